"""Values of JSON with all their texts made visible.

What a model wrote is in rollouts, and may come to stand in a fault's words or in a log: no text reaches the
page with characters that hide something or turn text around.
"""

from forgeasync.observability import visible

MAX_DEPTH = 40
"""Deeper parts are replaced by words that say so."""


def shown(value: object, depth: int = 0) -> object:
    """Return the value with control characters and their like as escapes, in keys too."""
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else visible(value)
    if isinstance(value, float | int) or value is None:
        return value
    if depth > MAX_DEPTH:
        return "(nested too deep to be shown)"
    if isinstance(value, dict):
        return {visible(str(key)): shown(one, depth + 1) for key, one in value.items()}
    assert isinstance(value, list | tuple), f"an answer has {type(value).__name__}"
    return [shown(one, depth + 1) for one in value]
