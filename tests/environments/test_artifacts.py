"""Files that episodes keep: where they lie, and what is not kept."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.environments import MAX_FILES, EpisodeArtifacts, artifact_folder_name
from forgeasync.environments.agent import MAX_BYTES
from forgeasync.rollouts import EpisodeId
from tests.support.disks import small_disk


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


def test_attempts_have_folders_of_their_own() -> None:
    assert artifact_folder_name(EpisodeId(group_id=12, index=3, attempt=1)) == "12-3-1"
    assert artifact_folder_name(EpisodeId(group_id=-4, index=0)) == "evaluation_4-0-0"
