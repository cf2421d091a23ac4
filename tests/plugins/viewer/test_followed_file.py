"""Files that grow, are cut and are replaced while they are read."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.plugins.viewer import FollowedFile


class Lines:
    """The lines of one file, in which each begins where it is said to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[bytes] = []

    def add(self, line: bytes, offset: int) -> None:
        with self.path.open("rb") as file:
            file.seek(offset)
            assert file.read(len(line)) == line
        self.found.append(line)


def follow(path: Path, **bounds: int) -> FollowedFile[Lines]:
    return FollowedFile(path, partial(Lines, path), **bounds)


def all_lines(file: FollowedFile[Lines]) -> list[bytes]:
    """Everything up to the end of the file as it is."""
    while file.read_some():
        pass
    return file.contents.found


LINES = st.lists(st.binary(max_size=20).map(lambda one: one.replace(b"\n", b"")), max_size=12)


@given(lines=LINES, cuts=st.lists(st.integers(min_value=0), max_size=6), piece_bytes=st.integers(1, 30))
def test_whatever_is_there_at_a_time_the_lines_come_whole_once_and_in_order(
    tmp_path_factory, lines: list[bytes], cuts: list[int], piece_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "file.jsonl"
    whole = b"".join(line + b"\n" for line in lines)
    reader = follow(path, piece_bytes=piece_bytes)
    for size in (*sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)):
        path.write_bytes(whole[:size]) if not path.exists() else append(path, whole[:size])
        assert all_lines(reader) == whole[:size].split(b"\n")[:-1]
    assert all_lines(reader) == lines


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content[path.stat().st_size :])


def replace(path: Path, content: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(content)
    os.replace(other, path)


def cut_and_grow(path: Path, content: bytes) -> None:
    """The same file, of which only the first line is as it was."""
    with path.open("r+b") as file:
        file.truncate(4)
        file.seek(4)
        file.write(content[4:])


LONG = b"x" * 500


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        ([b"one", b"two"], replace, [b"three", b"four", b"five"]),
        ([b"one", LONG], replace, [b"two", LONG]),
        ([b"one", b"two"], cut_and_grow, [b"one", b"2", b"three", b"four"]),
        ([b"one"], lambda path, content: path.unlink(), []),
    ],
    ids=["replaced", "replaced with the same end", "cut and grown past its old end", "gone"],
)
def test_a_file_that_is_another_one_now_is_read_anew(
    tmp_path: Path, before: list[bytes], change: Callable[[Path, bytes], object], after: list[bytes]
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in before))
    reader = follow(path)
    assert all_lines(reader) == before
    change(path, b"".join(line + b"\n" for line in after))
    assert reader.read_some() and reader.contents.found == after and not reader.read_some()


def test_a_line_that_is_too_long_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"one\n" + b"x" * 100 + b"\ntwo\n")
    reader = follow(path, piece_bytes=4, max_line_bytes=16)
    assert all_lines(reader) == [b"one"] and reader.num_unread_bytes == 105
    assert reader.problem == "file.jsonl: a line is too long, and is not read with what follows it"
