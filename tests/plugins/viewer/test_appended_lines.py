"""Files that grow, are cut and are replaced while they are read."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from forgeasync.plugins.viewer import AppendedLines


def all_lines(file: AppendedLines) -> list[bytes]:
    """Everything up to the end of the file as it is, the first reading included."""
    found: list[bytes] = []
    while (piece := file.read()) is not None:
        found = ([] if piece.is_anew else found) + piece.lines()
    return found


LINES = st.lists(st.binary(max_size=20).map(lambda one: one.replace(b"\n", b"")), max_size=12)


@given(lines=LINES, cuts=st.lists(st.integers(min_value=0), max_size=6), piece_bytes=st.integers(1, 30))
def test_whatever_is_there_at_a_time_the_lines_come_whole_once_and_in_order(
    tmp_path_factory, lines: list[bytes], cuts: list[int], piece_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "file.jsonl"
    whole = b"".join(line + b"\n" for line in lines)
    reader = AppendedLines(path, piece_bytes=piece_bytes)
    found: list[bytes] = []
    for size in (*sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)):
        path.write_bytes(whole[:size]) if not path.exists() else append(path, whole[:size])
        while (piece := reader.read()) is not None:
            assert not piece.is_anew
            assert whole[piece.start :].startswith(piece.data)
            found += piece.lines()
        assert found == whole[:size].split(b"\n")[:-1]
    assert found == lines


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content[path.stat().st_size :])


def test_a_file_that_is_not_there_has_no_lines_and_no_problem(tmp_path: Path) -> None:
    reader = AppendedLines(tmp_path / "none.jsonl")
    assert reader.read() is None
    assert reader.problem is None


def test_a_replaced_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"one\ntwo\n")
    reader = AppendedLines(path)
    assert all_lines(reader) == [b"one", b"two"]
    (tmp_path / "other").write_bytes(b"three\nfour\nfive\n")
    os.replace(tmp_path / "other", path)
    piece = reader.read()
    assert piece is not None and piece.is_anew and piece.start == 0
    assert piece.lines() == [b"three", b"four", b"five"]


def test_a_replaced_file_is_known_though_its_end_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"one\n" + b"x" * 500 + b"\n")
    reader = AppendedLines(path)
    all_lines(reader)
    (tmp_path / "other").write_bytes(b"two\n" + b"x" * 500 + b"\n")
    os.replace(tmp_path / "other", path)
    assert all_lines(reader) == [b"two", b"x" * 500]


def test_a_file_that_was_cut_and_has_grown_past_its_old_end_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"one\ntwo\n")
    reader = AppendedLines(path)
    all_lines(reader)
    with path.open("r+b") as file:
        file.truncate(4)
        file.seek(4)
        file.write(b"2\nthree\nfour\n")
    piece = reader.read()
    assert piece is not None and piece.is_anew
    assert piece.lines() == [b"one", b"2", b"three", b"four"]


def test_a_file_that_is_gone_takes_its_lines_along(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"one\n")
    reader = AppendedLines(path)
    all_lines(reader)
    path.unlink()
    piece = reader.read()
    assert piece is not None and piece.is_anew and piece.lines() == []
    assert reader.read() is None


def test_a_line_that_is_too_long_is_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"one\n" + b"x" * 100 + b"\ntwo\nthree")
    reader = AppendedLines(path, piece_bytes=4, max_line_bytes=16)
    lines, num_overlong = [], 0
    while (piece := reader.read()) is not None:
        lines += piece.lines()
        num_overlong += piece.num_overlong
    assert (lines, num_overlong) == ([b"one", b"two"], 1)
    append(path, path.read_bytes() + b"\n")
    assert all_lines(reader) == [b"three"]


def test_a_folder_in_place_of_the_file_is_a_problem_in_words(tmp_path: Path) -> None:
    (tmp_path / "file.jsonl").mkdir()
    reader = AppendedLines(tmp_path / "file.jsonl")
    assert reader.read() is None
    assert reader.problem == "file.jsonl cannot be read: Is a directory"
