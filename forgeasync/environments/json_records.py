"""Reads the records of a local JSON file, each with its place in the file.

``datasets`` is not used for this: it names no lines, takes no numbers above 64 bits, and fails on files whose
records do not all have the same keys.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, object]


def read_json_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the place ("line 8", "record 7") and the value of each record; blank lines are skipped.

    The file has one object per line, or one list of objects.

    Raises:
        ValueError: it has something else; says where and what.
    """
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(_MARK).lstrip()
    if start.startswith(b"["):
        yield from _of_list(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_MARK) if number == 1 else line
            if text.strip():
                yield f"line {number}", _object(_parse(text, f"line {number}"), f"line {number}")


_MARK = b"\xef\xbb\xbf"
"""Byte order mark, with which some editors begin UTF-8 files."""


def _of_list(path: Path) -> Iterator[tuple[str, Record]]:
    records = _parse(path.read_bytes().removeprefix(_MARK), "")
    assert isinstance(records, list), "what begins with [ is a list, or no JSON"
    for index, value in enumerate(records):
        yield f"record {index}", _object(value, f"record {index}")


def _object(value: object, where: str) -> Record:
    if not isinstance(value, dict):
        remedy = 'must be an object such as {"question": ...}'
        raise ValueError(f"{where} holds {type(value).__name__} {value!r:.40}; {remedy}")
    return value


def _parse(text: bytes, where: str) -> object:
    """Parse a line, or a whole file if ``where`` is empty."""
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where or 'the file'} is not UTF-8 text: {error.reason} (byte {error.start})"
        ) from None
    except json.JSONDecodeError as error:
        place = f"{where}, column {error.colno}" if where else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{place} is not valid JSON: {error.msg}{_excerpt(error.doc, error.pos)}") from None
    except RecursionError:
        raise ValueError(f"{where or 'the file'} is nested too deeply") from None
    except ValueError as error:
        # Integers of thousands of digits.
        raise ValueError(f"{where or 'the file'} is not valid JSON: {error}") from None


def _excerpt(text: str, position: int) -> str:
    found = text[max(0, position - 30) : position + 10].strip()
    return f" near {found!r}" if found else ""


_INTEGERS = range(-(2**63), 2**63)
"""Integers that the files of a checkpoint can hold."""


_MAX_DEPTH = 32

_LEFT_OUT = object()


def json_like(record: Mapping[Any, Any]) -> dict[str, Any]:
    """Copy a record with plain values only.

    Lists and mappings are copied recursively, tuples become lists, and whole numbers of more than 64 bits
    become text. Values that JSON cannot hold (images, bytes, NaN, half characters) are left out with their
    keys.
    """
    plain = _plain(record, 0)
    return plain if isinstance(plain, dict) else {}


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value) if _is_whole_text(value) else _LEFT_OUT
    if isinstance(value, int):
        return int(value) if value in _INTEGERS else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _LEFT_OUT
    if depth >= _MAX_DEPTH:
        return _LEFT_OUT
    if isinstance(value, Mapping):
        items = {str(key): _plain(item, depth + 1) for key, item in value.items() if _is_key(key)}
        return {key: item for key, item in items.items() if item is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        plain = [_plain(item, depth + 1) for item in value]
        # Leaving out one item would change the indices of the others.
        return _LEFT_OUT if any(item is _LEFT_OUT for item in plain) else plain
    return _LEFT_OUT


def _is_key(key: object) -> bool:
    return isinstance(key, str) and _is_whole_text(key)


def _is_whole_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
