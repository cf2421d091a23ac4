"""What a person or a judge says of a session."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forgeasync.environments.sessions.fields import Fields, wrong

MAX_COMMENT_CHARS = 10_000

MAX_SCORE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """One verdict."""

    score: float
    comment: str | None = None


def read_feedback(body: Mapping[str, Any]) -> tuple[Feedback, bool]:
    """Return a request's feedback, and whether it ends the session, which is so unless ``finished`` is false.

    Raises:
        RequestError: a field is malformed or unknown; names it.
    """
    fields = Fields(body)
    score = fields.required("score")
    # A huge integer has no float, so it is compared before it is converted.
    if (
        not isinstance(score, int | float)
        or isinstance(score, bool)
        or not -MAX_SCORE <= score <= MAX_SCORE
        or not math.isfinite(score)
    ):
        raise wrong("score", score, f"must be a number from {-MAX_SCORE:g} to {MAX_SCORE:g}")
    comment = fields.text("comment")
    if comment is not None and len(comment) > MAX_COMMENT_CHARS:
        raise wrong("comment", comment, f"must have at most {MAX_COMMENT_CHARS} characters")
    finished = fields.take("finished")
    if finished is not None and not isinstance(finished, bool):
        raise wrong("finished", finished, "must be true or false")
    fields.refuse_rest()
    return Feedback(score=float(score), comment=comment), finished is not False
