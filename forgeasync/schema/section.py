"""What all sections of a run's config have in common, and the ranges that many of their numbers share.

Every number has an upper bound too: one that is far too large shall be refused here, not by the memory, the
integer type or the clock that it is handed to.
"""

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    WrapSerializer,
)

MAX_COUNT = 10**9
"""Fits the 32-bit integers of the libraries that counts are handed to, also with a little added."""


Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]

CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A count that may be 0."""


Procs = Annotated[int, Field(gt=0, le=65536)]
"""Processes, GPUs or hosts."""


MAX_SECONDS = 366 * 86400.0


Seconds = Annotated[float, Field(ge=0.1, le=MAX_SECONDS)]
"""A deadline: shorter ones end before any call has an answer, much longer ones overflow timers."""


Factor = Annotated[float, Field(ge=1e-30, le=1e30)]
"""What float32 tensors are multiplied by or compared with: there it is neither 0 nor infinite."""


Gibibytes = Annotated[float, Field(gt=0.0, le=65536.0)]


MAX_SEED = 2**32 - 1


Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
"""NumPy takes 32 bits, and vLLM hands its seed on to it."""


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent type conversion from strings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


def _read_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _write_kind(value: Any, write: SerializerFunctionWrapHandler) -> Any:
    written = write(value)
    return written["kind"] if isinstance(written, dict) and written.keys() == {"kind"} else written


SHORT_FORM = (BeforeValidator(_read_kind), WrapSerializer(_write_kind))
"""Annotations of a union of sections that may be given by their ``kind`` alone: ``advantage: grpo``. They are
written so too where the kind is all that there is to say."""
