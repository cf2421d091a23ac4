"""A teacher behind a real HTTP server: what it is asked, what counts as its answer, and when it is away."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from forgeasync.config import TeacherEndpoint, TeacherSection
from forgeasync.rollouts import TeacherRecord, WrongTeacherRecord
from forgeasync.scoring import EndpointRefuses, RewardUnavailable, TeacherClient
from tests.support.chat_server import ChatServer, Reply, serving

IDS = np.array([3, 4, 5, 6], np.int32)


def position(token: int, logprob: float, *others: tuple[int, float], rank: int = 9) -> dict[str, Any]:
    """As vLLM writes it: the token, and the likeliest ids; one that is both has its rank among them."""
    found = {token: {"logprob": logprob, "rank": rank, "decoded_token": f"<{token}>"}}
    for place, (other, value) in enumerate(others, start=1):
        found[other] = {"logprob": value, "rank": place, "decoded_token": f"<{other}>"}
    return {str(name): one for name, one in found.items()}


def completion(*positions: object) -> Reply:
    return 200, {}, json.dumps({"id": "c", "choices": [{"text": "", "prompt_logprobs": [None, *positions]}]})


GOOD = (
    position(4, -0.5, (4, -0.5), (7, -1.0)),
    position(5, -2.0, (8, -0.1), (9, -2.5)),
    # A tie: the token has the rank of an id that is among the likeliest.
    position(6, -0.7, (1, -0.2), (2, -0.7), rank=2),
)


def with_second(found: object) -> Reply:
    """All is good but for position 2."""
    return completion(GOOD[0], found, GOOD[2])


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serving(lambda request: completion(*GOOD)) as one:
        yield one


def ask(server: ChatServer, *, num_prompt: int = 2, num_ids: int = 2, **fields: object) -> TeacherRecord:
    async def go() -> TeacherRecord:
        client = TeacherClient(TeacherEndpoint(base_url=server.url, model="large", **fields))
        try:
            return await client.score(IDS, num_prompt=num_prompt, num_ids=num_ids)
        finally:
            await client.close()

    return asyncio.run(go())


def test_tokens_go_as_ids_and_come_back_by_id(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    found = ask(server, api_key_env="TEACHER_KEY")
    assert found.logprobs_T.tolist() == pytest.approx([-2.0, -0.7])
    assert found.ids_TK.tolist() == [[8, 9], [1, 2]]
    assert found.topk_TK.tolist() == [pytest.approx([-0.1, -2.5]), pytest.approx([-0.2, -0.7])]
    (request,) = server.requests
    assert request["prompt"] == [3, 4, 5, 6] and request["prompt_logprobs"] == 2
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("large", 1.0, 1)
    assert server.keys == ["Bearer secret"]
    with pytest.raises(ValueError, match="environment variable NO_SUCH_KEY is not set"):
        ask(server, api_key_env="NO_SUCH_KEY")


def test_a_token_among_the_likeliest_and_no_ids_at_all(server: ChatServer) -> None:
    whole = ask(server, num_prompt=1)
    assert whole.ids_TK[0].tolist() == [4, 7] and whole.logprobs_T[0] == pytest.approx(-0.5)
    server.reply = lambda request: completion(*(position(token, -1.0) for token in (4, 5, 6)))
    alone = ask(server, num_ids=0)
    assert alone.ids_TK.shape == (2, 0) and alone.logprobs_T.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [
        (completion(*GOOD[:2]), WrongTeacherRecord, "scored 3 positions; must be 4"),
        (with_second(position(9, -1.0)), WrongTeacherRecord, "not score token 5 at .* 2"),
        (with_second(None), WrongTeacherRecord, "no log-probabilities at position 2"),
        (with_second({"5": 1.0}), WrongTeacherRecord, "no log-probabilities at position 2"),
        (with_second(position(5, -1.0, (8, -0.1))), WrongTeacherRecord, "the 2 likeliest ids at position 2"),
        ((200, {}, "{}"), EndpointRefuses, "no completion with prompt_logprobs"),
        ((200, {}, "[" * 100_000), EndpointRefuses, "sent more than|no completion"),
        ((200, {}, '{"choices": [{"prompt_logprobs": null}]}'), EndpointRefuses, "must be a server of vLLM"),
        ((200, {}, " " * 200_000), EndpointRefuses, "sent more than"),
        ((400, {}, json.dumps({"message": "k too large"})), EndpointRefuses, "status 400: .*k too large"),
        ((404, {}, "{}"), EndpointRefuses, "large at http.*status 404"),
        ((500, {}, "{}"), RewardUnavailable, "status 500"),
        ((429, {"retry-after": "7"}, "{}"), RewardUnavailable, "status 429"),
    ],
)
def test_what_is_no_answer_is_an_error(
    server: ChatServer, reply: Reply, error: type[Exception], said: str
) -> None:
    server.reply = lambda request: reply
    with pytest.raises(error, match=said) as raised:
        ask(server)
    if reply[0] == 429:
        assert isinstance(raised.value, RewardUnavailable) and raised.value.retry_after_s == 7.0


def test_a_number_that_stands_for_minus_infinity_is_no_number(server: ChatServer) -> None:
    server.reply = lambda request: with_second(position(5, -9999.0, (8, -0.1), (9, -9999.0)))
    found = ask(server)
    assert np.isnan(found.logprobs_T[0]) and np.isnan(found.topk_TK[0, 1]), "refused by check_teacher_record"


def test_a_server_that_is_down_or_slow_is_away(server: ChatServer) -> None:
    server.go_down()
    with pytest.raises(RewardUnavailable, match="no connection"):
        ask(server)
    server.come_back()
    assert len(ask(server).logprobs_T) == 2


async def test_replies_are_parsed_beside_the_loop(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing waits here for the event loop: on the loop's own thread it would wait in vain."""
    is_parsing, has_gone_on = threading.Event(), threading.Event()
    parse = TeacherClient._positions

    def parse_later(self: TeacherClient, body: bytes) -> list[Any]:
        is_parsing.set()
        assert has_gone_on.wait(10.0)
        return parse(self, body)

    async def others() -> None:
        while not is_parsing.is_set():
            await asyncio.sleep(0.001)
        has_gone_on.set()

    monkeypatch.setattr(TeacherClient, "_positions", parse_later)
    client = TeacherClient(TeacherEndpoint(base_url=server.url, model="large"))
    found, _ = await asyncio.gather(client.score(IDS, num_prompt=2, num_ids=2), others())
    await client.close()
    assert len(found.logprobs_T) == 2


def test_a_teacher_is_in_one_place() -> None:
    endpoint = TeacherEndpoint(base_url="http://localhost:1/v1", model="m")
    assert TeacherSection(endpoint=endpoint).num_engines == 0
    assert TeacherSection(model_path="x").num_engines == 1
    for fields in ({}, {"model_path": "x", "endpoint": endpoint}):
        with pytest.raises(ValidationError, match="must have either model_path or endpoint"):
            TeacherSection(**fields)
