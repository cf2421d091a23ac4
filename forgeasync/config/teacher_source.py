"""The setting ``teachers.NAME.source``: which of the policy's published versions a teacher takes."""

import contextlib
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from forgeasync.config.weights import Interruption, KvAfterSwap, WeightsSection
from forgeasync.schema import MAX_COUNT, Section


class FixedSource(StrEnum):
    """Sources without a number."""

    FROZEN = "frozen"
    """The weights of the teacher's folder, or of its server, to the end of the run."""
    LIVE = "live"
    """The policy's weights: every version that is published, as generators take them."""

    def is_due(self, version: int, *, newest: int) -> bool:
        """Whether a version is to be taken; ``newest`` is the last one that was."""
        return self is FixedSource.LIVE and version > newest


class EveryVersions(Section):
    """The policy's weights, taken at every so many versions."""

    every: int = Field(gt=0, le=MAX_COUNT)
    """Versions that this number divides are taken. Where the exchange skipped such a version, or has it no
    more, the next version that there is takes its place."""

    def is_due(self, version: int, *, newest: int) -> bool:
        """Whether a version is to be taken; ``newest`` is the last one that was.

        It is the first one at or beyond a multiple of ``every``.
        """
        return version // self.every > newest // self.every


class AveragedPolicy(Section):
    """An average of the policy's weights, which the trainer keeps and publishes with every version."""

    ema: float = Field(gt=0.0, lt=1.0)
    """Share of itself that the average keeps at a step: ema * average + (1 - ema) * weights."""

    def is_due(self, version: int, *, newest: int) -> bool:
        """Whether a version is to be taken; ``newest`` is the last one that was."""
        return version > newest


FORMS = "frozen, live, {every: N} with N from 1, or {ema: ALPHA} with ALPHA between 0 and 1"


def _form(value: Any) -> str:
    match value:
        case AveragedPolicy():
            return "ema"
        case EveryVersions():
            return "every"
        case _:
            return "fixed"


def _read(value: Any) -> Any:
    """Read a section by its only key; what is wrong with it is told of the whole, by ``FORMS``."""
    match value:
        case FixedSource() | "frozen" | "live" | EveryVersions() | AveragedPolicy():
            return value
        case {"every": _} | {"ema": _}:
            section = EveryVersions if "every" in value else AveragedPolicy
            with contextlib.suppress(ValidationError):
                return section.model_validate(value, strict=True)
    raise PydanticCustomError("teacher_source", "expected {forms}", {"forms": FORMS})


TeacherSource = Annotated[
    Annotated[FixedSource, Tag("fixed")]
    | Annotated[EveryVersions, Tag("every")]
    | Annotated[AveragedPolicy, Tag("ema")],
    Discriminator(_form),
    BeforeValidator(_read),
]
"""One of ``FORMS``."""


def weights_of_teacher(weights: WeightsSection) -> WeightsSection:
    """How versions get into a teacher's engines, where ``weights`` says it of the generators' engines.

    No score mixes two versions: what runs at a swap is computed again, from its first token.
    """
    changes = {"interruption": Interruption.IN_FLIGHT, "kv_cache": KvAfterSwap.RECOMPUTE}
    return weights.model_copy(update=changes)
