"""The wire to a Verifiers server: what is read of hostile bytes, and what a report says about the score."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.environments import (
    LEFT_OUT,
    ContextFull,
    EpisodeReport,
    Report,
    TooManyTurns,
    Trace,
    cancel_request,
    read_frames,
    read_reply,
    run_request,
    score_of,
    task_fields,
)
from forgeasync.environments.verifiers_server.scoring import EpisodeFailed
from forgeasync.environments.verifiers_server.wire import Refusal, WireError
from tests.support.adapters.episodes import task

OURS = "http://127.0.0.1:1/sessions/a/v1"

pack = msgspec.msgpack.encode
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
numbers = st.floats(-1e6, 1e6)
traces = st.fixed_dictionaries(
    {
        "num_nodes": st.integers(0, 5),
        "num_calls": st.integers(0, 3),
        "rewards": st.dictionaries(st.sampled_from("abc"), st.tuples(numbers, numbers), min_size=1),
        "metrics": st.dictionaries(st.sampled_from("xyz"), numbers | st.none()),
    }
)


def deltas_of(name: str, trace: dict[str, Any], extra: Any, step: int) -> list[dict[str, Any]]:
    """A trace as a server streams it: ``step`` messages at a time, with fields that are not read."""
    found: list[dict[str, Any]] = [{"trace": name, "open": {"id": name, "task": extra}}]
    for begin in range(0, trace["num_nodes"], step):
        num = min(step, trace["num_nodes"] - begin)
        found.append({"trace": name, "nodes": [{"message": extra}] * num, "links": {begin: [extra]}})
        # Rewards are sent again whole when they change.
        found.append({"trace": name, "set": {"rewards": {"early": None}, "timing": extra}})
    found.append({"trace": name, "calls": [{"node": 0, "usage": extra}] * trace["num_calls"]})
    rewards = {key: {"score": a, "weight": b} for key, (a, b) in trace["rewards"].items()}
    found.append({"trace": name, "set": {"rewards": rewards, "metrics": trace["metrics"], "ok": True}})
    return found


@given(trace=traces, abandoned=traces, extra=json_values, step=st.integers(1, 3), data=st.data())
def test_a_report_is_what_was_streamed_however_it_is_cut(
    trace: dict[str, Any], abandoned: dict[str, Any], extra: Any, step: int, data: st.DataObject
) -> None:
    streams = [deltas_of("a", trace, extra, step), deltas_of("b", abandoned, extra, 1)]
    report = Report()
    while any(streams):
        stream = data.draw(st.sampled_from([one for one in streams if one]))
        report.apply(pack(stream.pop(0)))
    report.apply(pack({"trace": "b", "discard": True}))
    summary = {"id": "a", "nodes": trace["num_nodes"], "calls": trace["num_calls"]}
    reply = {"success": True, "error": None, "head": {"ok": True, "env": extra}, "traces": [summary]}
    finished = report.finish(pack(reply))
    assert isinstance(finished, EpisodeReport)
    score = score_of(finished, base_url=OURS, correct_at=0.5)
    expected = math.fsum(a * b for a, b in trace["rewards"].values())
    assert score.value == expected and score.is_correct == (expected >= 0.5)
    parts = {key: a * b for key, (a, b) in trace["rewards"].items()}
    parts |= {key: one for key, one in trace["metrics"].items() if one is not None}
    assert score.parts == parts
    for_b = [{"id": "b", "nodes": abandoned["num_nodes"], "calls": abandoned["num_calls"]}]
    with pytest.raises(WireError, match="nothing of"):
        report.finish(pack(reply | {"traces": for_b}))
    summary["nodes"] += 1
    with pytest.raises(WireError, match="messages"):
        report.finish(pack(reply))


@given(payload=st.binary(max_size=60) | json_values.map(pack))
def test_bytes_that_are_no_message_are_said_to_be_none(payload: bytes) -> None:
    for read in (Report().apply, Report().finish, read_reply):
        try:
            read(payload)
        except WireError as error:
            assert "\n" not in str(error)


def test_bytes_that_are_nested_or_numerous_beyond_measure() -> None:
    deep = b"\x91" * 1_000_000 + b"\x00"
    for payload in (
        deep,
        b"\x82\xa5trace\xa1a\xa4open" + deep,
        b"\x82\xa5trace\xa1a\xa5nodes\xdd\xff\xff\xff\xff",
    ):
        with pytest.raises(WireError):
            Report().apply(payload)
    report = Report()
    with pytest.raises(WireError, match="more than 1024 traces"):
        for number in range(1025):
            report.apply(pack({"trace": str(number)}))


@given(frames=st.lists(st.binary(max_size=8) | st.sampled_from([b"delta", b"reply"]), max_size=5))
def test_frames_that_answer_nothing(frames: list[bytes]) -> None:
    is_answer = len(frames) == 3 and frames[1] in (b"delta", b"reply")
    try:
        _, is_last, payload = read_frames(frames)
    except WireError:
        assert not is_answer
    else:
        assert is_answer and is_last == (frames[1] == b"reply") and payload == frames[2]


def test_a_request_holds_the_session_and_the_task() -> None:
    request = run_request(task_data={"prompt": "p", "n": 3}, base_url=OURS, api_key="k", model="m")
    request_id, method, payload = request.frames
    assert method == b"run" and request_id.decode() == request.request_id
    assert msgspec.msgpack.decode(payload) == {
        "task_data": {"prompt": "p", "n": 3},
        "client": {
            "type": "eval",
            "base_url": OURS,
            "headers": {"x-api-key": "k"},
            "api_key_var": "FORGEASYNC_API_KEY",
        },
        "model": "m",
        "sampling": {},
    }
    cancel = cancel_request(request)
    assert cancel.request_id != request.request_id
    assert msgspec.msgpack.decode(cancel.payload) == {"request_id": request.request_id}
    with pytest.raises(ValueError, match="cannot be sent as msgpack"):
        run_request(task_data={"n": 2**70}, base_url=OURS, api_key="k", model="m")


def finished(*given: Trace, ok: bool = True, errors: tuple[Any, ...] = (), is_timeout: bool = False):
    return EpisodeReport(traces=given, ok=ok, is_timeout=is_timeout, errors=errors)


def trace(score: float | None = 1.0, **more: Any) -> Trace:
    report = Report()
    rewards = {"r": None if score is None else {"score": score}}
    errors = more.pop("errors", [])
    report.apply(pack({"trace": "t", "set": {"rewards": rewards}, "errors": errors}))
    found = report._traces["t"]
    for name, value in more.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize("score", [math.nan, math.inf, 1e308, None])
def test_rewards_that_are_no_finite_number_are_no_score(score: float | None) -> None:
    with pytest.raises(ValueError, match=r"finite|given no reward"):
        score_of(finished(trace(score)), base_url=OURS, correct_at=1.0)


def test_metrics_that_cannot_be_parts_are_counted() -> None:
    metrics = {"fine": 2.0, "not a name": 1.0, "nan": math.nan, "none": None, "r": 3.0}
    metrics |= {f"m{number}": 1.0 for number in range(70)}
    score = score_of(finished(trace(metrics=metrics)), base_url=OURS, correct_at=1.0)
    assert len(score.parts) == 64 and score.parts["fine"] == 2.0 and score.parts["r"] == 1.0
    # The reward, "fine" and 61 of 70 more have room beside the count; three others cannot be parts.
    assert score.parts[LEFT_OUT] == (70 - 61) + 3


def test_episodes_with_more_than_one_trace_that_trains_have_no_one_score() -> None:
    with pytest.raises(ValueError, match=r"has 2 traces that train \(agent, agent\)"):
        score_of(finished(trace(), trace()), base_url=OURS, correct_at=1.0)
    judge = trace(is_trainable=False, agent_name="judge", base_url="http://elsewhere", num_calls=1)
    assert score_of(finished(trace(), judge), base_url=OURS, correct_at=1.0).value == 1.0
    judge.base_url = OURS
    with pytest.raises(ValueError, match="'judge', which does not train, was sampled by the policy"):
        score_of(finished(trace(), judge), base_url=OURS, correct_at=1.0)


def test_why_an_episode_has_failed() -> None:
    def failed(message: str) -> EpisodeReport:
        return finished(trace(errors=[{"type": "ProviderError", "message": message}]), ok=False)

    with pytest.raises(TooManyTurns):
        score_of(failed('upstream 410: {"error": {"code": "too_many_turns"}}'), base_url=OURS, correct_at=1.0)
    with pytest.raises(ContextFull):
        score_of(failed('400: {"code":"context_length_exceeded"}'), base_url=OURS, correct_at=1.0)
    with pytest.raises(EpisodeFailed, match="ProviderError: some thing"):
        score_of(failed("some\nthing"), base_url=OURS, correct_at=1.0)
    with pytest.raises(EpisodeFailed, match="deadline of its own"):
        score_of(finished(ok=False, is_timeout=True), base_url=OURS, correct_at=1.0)


def test_a_refusal_says_why() -> None:
    reply = pack({"success": False, "error": "ValidationError: turns\n  must be a number"})
    assert Report().finish(reply) == Refusal(error="ValidationError: turns must be a number")
    assert read_reply(reply) == Refusal(error="ValidationError: turns must be a number")
    assert read_reply(pack({"success": True})) is None


def test_what_of_a_task_is_sent() -> None:
    one = task(prompt="p", answer="a", tests=["x"])
    fields = {"question": "prompt", "gold": "answer", "n": "index", "id": "task_id", "t": "record.tests"}
    assert task_fields(one, fields, where="w") == {
        "question": "p",
        "gold": "a",
        "n": 7,
        "id": "t7",
        "t": ["x"],
    }
    with pytest.raises(ValueError, match=r"w\.t = 'record\.test', but the record of task t7 .* it has tests"):
        task_fields(one, {"t": "record.test"}, where="w")
