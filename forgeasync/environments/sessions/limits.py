"""What a client of a session can use up at most."""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Bounds of one session; raises ValueError, naming the field, if one is not positive and finite."""

    max_body_bytes: int = 8 * 2**20
    """Of a request, after decompression. A larger one gets 413."""
    max_turns_at_once: int = 64
    """Turns that are being sampled. A request beyond gets 429 and may try again."""
    max_open_requests: int = 256
    """Requests that are being answered, those that wait for a sampling of another one included."""
    idle_s: float = 120.0
    """For the first headers of a connection to arrive, and between two requests of one."""
    body_s: float = 30.0
    """For a request's body to arrive."""
    turn_s: float = 1800.0
    """For a request's turns to be sampled. After that they are given up, and the request gets 504."""
    write_s: float = 60.0
    """For a client to take in an answer, or a piece of one that is streamed."""
    keep_alive_s: float = 10.0
    """Between two signs of life in a stream. The first of them sends the headers."""
    keep_reply_s: float = 300.0
    """For which the answer to a request is kept for a retry."""
    max_kept_replies: int = 256
    max_shown_turns: int = 4096
    """Turns and responses that the session recognises when they come back."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"SessionLimits.{field.name} = {value}; must be positive and finite")
