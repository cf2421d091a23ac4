"""What an episode leaves for people: its record, and the files that it keeps."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.config import Ending
from forgeasync.environments import MAX_FILES, EpisodeArtifacts, episode_record
from forgeasync.environments.agent import MAX_BYTES
from tests.support.buffer_world import make_task
from tests.support.disks import small_disk

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


def test_arguments_that_json_has_not_are_kept_as_text() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": float("nan")}}}
    (branch,) = record_of([{"role": "assistant", "content": "", "tool_calls": [call]}])["agents"][0][
        "branches"
    ]
    assert branch[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{'x': nan}"}


def test_files_are_written_and_replaced(tmp_path: Path) -> None:
    artifacts = EpisodeArtifacts(folder=tmp_path / "artifacts" / "3-1-0")
    assert not (tmp_path / "artifacts").exists(), "an episode that keeps nothing has no folder"
    artifacts.keep("a.txt", "one")
    file = artifacts.keep("a.txt", "two \ud800")
    artifacts.keep("b.bin", b"\0\xff")
    assert file is not None and file.read_text() == "two \\ud800"
    assert artifacts.paths == ["artifacts/3-1-0/a.txt", "artifacts/3-1-0/b.bin"]
    assert (artifacts.num_files, artifacts.num_refused) == (2, 0)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "-a", "a\0", "a\n", "a" * 101, "ä", "a\\b", 7])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match="name of an artifact = "):
        EpisodeArtifacts(folder=tmp_path).keep(name, "x")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@given(st.text())
def test_no_name_leaves_the_folder(name: str) -> None:
    artifacts = EpisodeArtifacts(folder=None)
    try:
        artifacts.keep(name, "x")
    except ValueError:
        return
    assert Path("/folder", name).resolve().parent == Path("/folder")


def test_what_is_beyond_the_bounds_is_counted_and_not_written(tmp_path: Path) -> None:
    artifacts = EpisodeArtifacts(folder=tmp_path / "0-0-0")
    assert artifacts.keep("large", b"x" * (MAX_BYTES + 1)) is None
    assert artifacts.keep("large", b"x" * MAX_BYTES) is not None
    assert artifacts.keep("one_more", b"x") is None
    assert artifacts.keep("large", b"x") is not None, "it replaces itself"
    kept = [artifacts.keep(f"f{number}", b"x") is not None for number in range(MAX_FILES)]
    assert kept == [True] * (MAX_FILES - 1) + [False]
    assert artifacts.num_refused == 3 and len(list((tmp_path / "0-0-0").iterdir())) == MAX_FILES


def test_a_full_disk_costs_a_file_and_no_episode(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", num_mib=1) as disk:
        artifacts = EpisodeArtifacts(folder=disk / "0-0-0")
        assert artifacts.keep("small", b"x") is not None
        assert artifacts.keep("large", b"x" * 2**21) is None
        assert [one.name for one in (disk / "0-0-0").iterdir()] == ["small"], "no half of a file"
        assert artifacts.paths == ["disk/0-0-0/small"]
        assert (artifacts.num_files, artifacts.num_refused) == (1, 1)


def test_data_is_bytes_or_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data of artifact 'a' is dict; must be bytes or a string"):
        EpisodeArtifacts(folder=tmp_path).keep("a", {})  # type: ignore[arg-type]
