"""What of a record can travel: values that JSON can hold, so that every process reads the same."""

import math
from collections.abc import Mapping
from typing import Any

_INTEGERS = range(-(2**63), 2**63)
"""What the files of a checkpoint can hold."""

_MAX_DEPTH = 32
_LEFT_OUT = object()


def json_like(record: Mapping[Any, Any]) -> dict[str, Any]:
    """A copy of a record with plain values only.

    Lists and mappings are gone into, tuples become lists, whole numbers of more than 64 bits text. What
    JSON cannot hold (images, bytes, NaN, half characters) is left out, with its key.
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
        # A list with a gap would have other indices.
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
