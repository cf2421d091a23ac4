"""Connections that are lost and clients that ask again: nothing is sampled twice for one request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.environments import Attempt, Sampling, Samplings, Session, SessionLimits, SessionServer
from forgeasync.testing import HandTime
from tests.environments.sessions.apis import APIS, USER, Api
from tests.support.sessions import ScriptedAgent, openai_client, say, serving, until

Cut = Callable[[int, bytes], bool]


class CuttingProxy:
    """Forwards connections to a port of this machine.

    After each chunk that the server sends ``cut`` is asked, with the connection's number and all that the
    server has sent on it so far. If it says so, both ends are closed at once, and the chunk is lost.
    """

    def __init__(self, port: int, cut: Cut) -> None:
        self._to = port
        self._cut = cut
        self._num = 0
        self._open: list[asyncio.StreamWriter] = []
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut_all()

    @property
    def num_connections(self) -> int:
        return self._num

    def cut_all(self) -> None:
        """Close every connection now."""
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self._num
        self._num += 1
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._open += [writer, back_writer]

        async def forward() -> None:
            while chunk := await reader.read(65536):
                back_writer.write(chunk)
                await back_writer.drain()

        async def back() -> None:
            sent = b""
            while chunk := await back_reader.read(65536):
                sent += chunk
                if self._cut(number, sent):
                    break
                writer.write(chunk)
                await writer.drain()

        tasks = [asyncio.create_task(forward()), asyncio.create_task(back())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.transport.abort()
        back_writer.transport.abort()


def attempt(body: str = "a", num_retries: int = 0) -> Attempt:
    return Attempt(digest=body.encode(), num_retries=num_retries)


def begin(samplings: Samplings, one: Attempt, request: Any = None) -> Sampling:
    sampling = samplings.begin(one, request, reply=None)  # type: ignore[arg-type]
    sampling.num_waiting = 1
    return sampling


def leave(sampling: Sampling, *, is_delivered: bool) -> None:
    sampling.num_waiting -= 1
    sampling.is_delivered |= is_delivered


def test_what_is_kept_and_for_how_long() -> None:
    samplings = Samplings(keep_s=10, max_kept=2)
    all_ = [begin(samplings, attempt(str(index))) for index in range(5)]
    for time_s, one in enumerate(all_[:4]):
        samplings.ended(one, has_failed=False, now_s=time_s)
    assert samplings.expired(100) == []  # Somebody waits for each.
    for one in all_[1:]:
        leave(one, is_delivered=False)
    # Of three that have ended and nobody waits for, the oldest goes; the last one runs.
    assert samplings.expired(3) == [all_[1]]
    assert samplings.expired(12) == []
    assert samplings.expired(12.5) == [all_[2]]
    assert samplings.expired(13.5) == [all_[3]]
    assert samplings.clear() == [all_[0], all_[4]]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_client_gets_a_turn_and_none_is_sampled_without_need(data: st.DataObject) -> None:
    """Clients that ask the same or not, lose their connections and ask again until they have a turn.

    Each loss is noticed before the retry. Then every client ends with a turn that is its own.
    """
    samplings = Samplings(keep_s=1e9, max_kept=10**6)
    bodies = data.draw(st.text("ab", min_size=1, max_size=6))
    num_clients = len(bodies)
    num_retries = [0] * num_clients
    held: dict[int, Sampling] = {}
    waiting = set(range(num_clients))
    got: dict[int, Any] = {}
    num_begun = 0
    for _ in range(60):
        if not waiting:
            break
        client = data.draw(st.sampled_from(sorted(waiting)))
        if client in held:
            sampling = held.pop(client)
            if data.draw(st.booleans()):
                leave(sampling, is_delivered=True)
                waiting.remove(client)
                got[client] = sampling.request
            else:
                leave(sampling, is_delivered=False)
                num_retries[client] += 1
            continue
        one = attempt(bodies[client], num_retries=num_retries[client])
        found = samplings.find(one)
        if found is None and data.draw(st.booleans()):
            samplings.refused(one)
            num_retries[client] += 1
            continue
        if found is None:
            found = begin(samplings, one, num_begun)
            num_begun += 1
        else:
            found.num_waiting += 1
        assert found.num_waiting == 1, "two clients wait for one turn"
        assert found.attempt.digest == one.digest
        held[client] = found
    assert len(set(got.values())) == len(got)
    assert num_begun <= num_clients


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDKs wait half a second before they ask again."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("anthropic._base_client.INITIAL_RETRY_DELAY", 0.01)


def numbered(*, is_held: bool = False) -> ScriptedAgent:
    """An agent that gives every call an answer of its own; a held one once its gate is opened."""
    agent = ScriptedAgent(answer=lambda asking: say(f"answer {asking.number}"))
    if is_held:
        agent.gate.clear()
    return agent


@contextlib.asynccontextmanager
async def behind_proxy(
    agent: ScriptedAgent, cuts: Callable[[int, bytes], bool] = lambda number, sent: False, **limits: Any
) -> AsyncIterator[tuple[Session, CuttingProxy, SimpleNamespace]]:
    """A session, a proxy before it, and what a client is told of the session, which leads to the proxy."""
    async with serving(agent, limits=SessionLimits(**limits)) as (_, session):
        port = session.base_url.split(":")[2].partition("/")[0]
        async with CuttingProxy(int(port), cuts) as proxy:
            urls = {
                name: getattr(session, name).replace(port, str(proxy.port))
                for name in ("base_url", "anthropic_base_url")
            }
            yield session, proxy, SimpleNamespace(api_key=session.api_key, **urls)


async def chat(session: Any, **options: Any) -> str:
    async with openai_client(session, **options) as client:
        answer = await client.chat.completions.create(model="m", messages=[USER])
        return answer.choices[0].message.content


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
async def test_a_response_that_is_lost_on_its_way_is_given_again(api: Api) -> None:
    agent = numbered()
    async with behind_proxy(agent, lambda number, sent: number < 2) as (session, proxy, through):
        assert api.text(await api.ask(through, [USER])) == "answer 1"
        assert proxy.num_connections == 3
    assert len(agent.calls) == 1
    counts = session.counts
    assert (counts.num_retries_joined, counts.num_turns, counts.num_abandoned) == (2, 1, 0)


@pytest.mark.parametrize("num_clients", [1, 4])
async def test_clients_that_lose_their_connections_while_turns_are_sampled_get_one_each(
    num_clients: int,
) -> None:
    agent = numbered(is_held=True)
    async with behind_proxy(agent) as (session, proxy, through):
        asking = [asyncio.create_task(chat(through)) for _ in range(num_clients)]
        await until(lambda: len(agent.calls) == num_clients)
        proxy.cut_all()
        await until(lambda: session.counts.num_retries_joined == num_clients)
        agent.gate.set()
        got = sorted(await asyncio.gather(*asking))
    assert got == [f"answer {index + 1}" for index in range(num_clients)]
    assert (len(agent.calls), agent.num_cancelled, session.counts.num_abandoned) == (num_clients, 0, 0)


async def test_one_turn_too_many_is_told_when_to_come_back_and_gets_a_turn_of_its_own() -> None:
    """Its retry must not join the sampling of the sub-agent that asked the same."""
    agent = numbered(is_held=True)
    async with serving(agent, limits=SessionLimits(max_turns_at_once=1)) as (_, session):
        first = asyncio.create_task(chat(session))
        await until(lambda: len(agent.calls) == 1)
        with pytest.raises(openai.RateLimitError, match="1 turns of this session") as caught:
            await chat(session, max_retries=0)
        assert caught.value.response.headers["retry-after"] == "1"
        second = asyncio.create_task(chat(session))
        await until(lambda: session.counts.num_refused == 2)
        agent.gate.set()
        assert [await first, await second] == ["answer 1", "answer 2"]
    assert session.counts.num_retries_joined == 0


async def test_a_turn_that_failed_is_sampled_again() -> None:
    agent = ScriptedAgent([RuntimeError("lost a generator"), say("second")])
    async with serving(agent) as (_, session):
        assert await chat(session) == "second"
    assert len(agent.calls) == 2
    assert session.counts.num_failed == 1


async def test_a_turn_beyond_its_deadline_is_given_up_and_not_asked_for_again(hand_time: HandTime) -> None:
    agent = numbered(is_held=True)
    async with serving(agent, limits=SessionLimits(turn_s=0.02)) as (_, session):
        asking = asyncio.create_task(chat(session))
        await hand_time.stand_until(lambda: len(agent.calls) == 1)
        hand_time.advance(0.02)
        with pytest.raises(openai.InternalServerError, match=r"no turn within 0\.02 s"):
            await asking
        await hand_time.stand_until(lambda: agent.num_cancelled == 1)
    assert len(agent.calls) == 1
    assert session.counts.num_abandoned == 1


async def test_what_nobody_comes_back_for_is_counted_and_forgotten() -> None:
    agent = numbered(is_held=True)
    async with behind_proxy(agent, max_kept_replies=1) as (session, proxy, through):
        for index in range(3):
            with pytest.raises(openai.APIConnectionError):
                asking = asyncio.create_task(chat(through, max_retries=0))
                await until(lambda: len(agent.calls) == index + 1)  # noqa: B023
                proxy.cut_all()
                await asking
        await until(lambda: session.num_open_requests == 0)
        agent.gate.set()
        await until(lambda: session.counts.num_turns == 3)
        # One of the three is kept for a retry.
        await until(lambda: session.counts.num_abandoned == 2)
        session.close()
        await until(lambda: session.counts.num_abandoned == 3)


@pytest.mark.parametrize("where", [b"first-half", b"[DONE]"])
async def test_a_stream_that_breaks_off_is_kept_for_a_client_that_asks_again(where: bytes) -> None:
    """The SDK itself does not retry a stream that has begun; a client may, with the header of a retry."""
    agent = ScriptedAgent([say("first-half " + "x" * 500), say("other")])
    texts = []
    async with (
        behind_proxy(agent, lambda number, sent: where in sent and number == 0) as (_, _, through),
        openai_client(through) as client,
    ):
        for count in ("0", "1"):
            stream = client.chat.completions.create(
                model="m", messages=[USER], stream=True, extra_headers={"x-stainless-retry-count": count}
            )
            text = ""
            try:
                async for chunk in await stream:
                    text += chunk.choices[0].delta.content or ""
            except openai.APIConnectionError:
                text = "lost"
            texts.append(text)
    assert texts == ["lost", "first-half " + "x" * 500]
    assert len(agent.calls) == 1


async def test_closing_ends_what_is_under_way() -> None:
    agent = numbered(is_held=True)
    async with SessionServer() as server:
        session, other = server.open(agent), server.open(numbered())
        asking = asyncio.create_task(chat(session))
        await until(lambda: len(agent.calls) == 1)
        session.close()
        with pytest.raises(openai.APIStatusError) as caught:
            await asking
        assert (caught.value.status_code, caught.value.code) == (410, "session_closed")
        with pytest.raises(openai.APIStatusError, match="this session is closed"):
            await chat(session)
        session.close()
        assert await chat(other) == "answer 1"
    assert (agent.num_cancelled, session.counts.num_abandoned) == (1, 1)
