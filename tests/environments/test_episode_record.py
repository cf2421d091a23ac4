"""Records of episodes: whole while there is room, and never larger than that, whatever was said."""

import json
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.config import Ending
from forgeasync.environments import EpisodeArtifacts, episode_record
from tests.support.buffer_world import make_task

TEXT = st.text(max_size=30)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": TEXT},
    optional={
        "reasoning_content": TEXT,
        "num_tokens": st.integers(0, 9),
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.just("function"),
                    "function": st.fixed_dictionaries(
                        {"name": TEXT, "arguments": st.dictionaries(TEXT, TEXT | st.floats(), max_size=3)}
                    ),
                }
            ),
            min_size=1,
            max_size=2,
        ),
    },
)


def record_of(*branches: list[dict[str, Any]]) -> dict[str, Any]:
    agent = SimpleNamespace(name="agent", num_turns=1, branches=lambda: list(branches))
    artifacts = EpisodeArtifacts(folder=None)
    return episode_record(make_task(0), [agent], Ending.COMPLETED, {}, None, artifacts)


def size(value: object) -> int:
    return len(json.dumps(value, allow_nan=False))


@settings(max_examples=150, deadline=None)
@given(branches=st.lists(st.lists(MESSAGES, min_size=1, max_size=4), max_size=3), room=st.integers(0, 900))
def test_a_record_has_what_there_is_room_for(branches: list[list[dict[str, Any]]], room: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        whole = record_of(*branches)["agents"][0]["branches"]
        patch.setattr(import_module("forgeasync.environments.episodes"), "MAX_BYTES", room)
        record = record_of(*branches)
    kept = record["agents"][0]["branches"]
    num_all, num_kept = (sum(size(one) for branch in some for one in branch) for some in (whole, kept))
    assert num_kept <= room and record["num_cut_bytes"] == num_all - num_kept
    if num_all <= room:
        assert kept == whole
    ours, theirs = ([one for branch in some for one in branch] for some in (kept, whole))
    assert ours[:-1] == theirs[: max(len(ours) - 1, 0)]
    for one, other in zip(ours[-1:], theirs[len(ours) - 1 :], strict=False):
        assert all(
            other[key].startswith(one[key]) for key in ("content", "reasoning_content") if key in other
        )
    json.dumps(record, allow_nan=False)


def test_a_message_that_is_too_large_keeps_the_beginnings_of_its_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes by hand: a character beyond ASCII takes six bytes, a line's end two."""
    first = {"role": "user", "content": "a"}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "y" * 100}}}
    large = {"role": "assistant", "content": "äb\n" * 50, "reasoning_content": "hm", "tool_calls": [call]}
    bare = size({"role": "assistant", "content": "", "reasoning_content": ""})
    monkeypatch.setattr(
        import_module("forgeasync.environments.episodes"), "MAX_BYTES", size(first) + bare - 1
    )
    record = record_of([first, large, first], [first])
    assert record["agents"][0]["branches"] == [[first], []], "what follows is not kept without it"
    monkeypatch.setattr(
        import_module("forgeasync.environments.episodes"),
        "MAX_BYTES",
        size(first) + bare + 6 + 1 + 2 + 6,
    )
    record = record_of([first, large, first], [first])
    part = {"role": "assistant", "content": "äb\nä", "reasoning_content": ""}
    assert record["agents"][0]["branches"] == [[first, part], []]
    assert record["num_cut_bytes"] == size(large) - size(part) + 2 * size(first)


def test_arguments_that_json_has_not_are_kept_as_text() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": float("nan")}}}
    (branch,) = record_of([{"role": "assistant", "content": "", "tool_calls": [call]}])["agents"][0][
        "branches"
    ]
    assert branch[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{'x': nan}"}
