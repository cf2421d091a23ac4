"""Files that are replaced as a whole."""

import os
from pathlib import Path

import pytest

from forgeasync.files import replacing


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_file_is_replaced_only_once_all_of_it_is_written(tmp_path: Path, is_flushed: bool) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"before")
    with replacing(path, is_flushed=is_flushed) as file:
        file.write(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after" and list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"before")
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
    (tmp_path / ".state.json.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), replacing(path) as file:
        file.write(b"after")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_flushed_files_are_on_the_disk_when_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[str, bool]] = []
    path = tmp_path / "state.json"

    def fsync(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with replacing(path, is_flushed=True) as file:
        file.write(b"whole")
    assert flushed == [(str(tmp_path / ".state.json.partial"), False), (str(tmp_path), True)]
