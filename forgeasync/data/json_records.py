"""Records of a local JSON file, each with the place where it stands.

Read here and not by ``datasets``: that names no lines, takes no number above 64 bits, and fails on files
whose records do not all have the same keys.
"""

import json
from collections.abc import Iterator
from pathlib import Path

Record = dict[str, object]


def read_json_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Place ("line 8", "record 7") and record, one after the other; blank lines are passed over.

    The file holds one object a line, or one list of objects.

    Raises:
        ValueError: it holds something else; says where and what.
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
"""Some editors begin UTF-8 files with it."""


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
    """The value of a line, or of a whole file where ``where`` is empty."""
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
