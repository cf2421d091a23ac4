"""Names that parts of a score can have: each becomes the metric ``reward/<name>``."""

import re

RESERVED_PARTS = frozenset({"mean", "std", "scored_mean"})
"""Metrics ``reward/<...>`` that no part can be."""

_PART_NAME = re.compile(r"[A-Za-z0-9][\w.\-/]{0,99}", re.ASCII)

PART_NAME_RULE = (
    "up to 100 letters, digits, '_', '-', '.' or '/', beginning with a letter or digit, and none of "
    + ", ".join(sorted(RESERVED_PARTS))
)


def is_part_name(name: object) -> bool:
    """Whether a part of a score can have this name."""
    return isinstance(name, str) and name not in RESERVED_PARTS and _PART_NAME.fullmatch(name) is not None
