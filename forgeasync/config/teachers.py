"""The ``teachers`` section: models that say how likely they find what the policy has sampled."""

import contextlib
import string
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from forgeasync.config.generator import GeneratorSection
from forgeasync.config.weights import Interruption, KvAfterSwap, WeightsSection
from forgeasync.schema import MAX_COUNT, Count, Seconds, Section

SIBLING = "sibling"
"""Stands in a teacher's ``prompt`` for the text of another response of the group that was correct."""

FEEDBACK = "feedback"
"""Stands in a teacher's ``prompt`` for what the reward has said about the response."""


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


def _read(value: Any) -> Any:
    """Read a section by its only key; what is wrong with it is told of the whole, by ``FORMS``."""
    match value:
        case FixedSource() | EveryVersions() | AveragedPolicy():
            return value
        case "frozen" | "live":
            return FixedSource(value)
        case {"every": _} | {"ema": _}:
            section = EveryVersions if "every" in value else AveragedPolicy
            with contextlib.suppress(ValidationError):
                return section.model_validate(value, strict=True)
    raise PydanticCustomError("teacher_source", "expected {forms}", {"forms": FORMS})


TeacherSource = Annotated[FixedSource | EveryVersions | AveragedPolicy, BeforeValidator(_read)]
"""One of ``FORMS``."""


class TeacherEndpoint(Section):
    """A teacher behind a server of vLLM (``/v1/completions`` with ``prompt_logprobs``)."""

    base_url: str = Field(pattern=r"^https?://[^\s/]+")
    """URL up to ``/v1``, such as ``http://localhost:8000/v1``."""
    model: str = Field(min_length=1)
    """The model's name there."""
    api_key_env: str | None = None
    """Name of the environment variable with the key, which is written nowhere; null: no key is sent."""
    limit_s: Seconds = 60.0
    """Time for one request, in seconds."""
    max_concurrent: int = Field(default=32, gt=0, le=65536)
    """Most requests at once."""
    max_unavailable_s: Seconds = 1800.0
    """A group that has waited so long for a server that is down is given up (``dropped/unscored``)."""


class TeacherSection(Section):
    """A model whose log-probabilities of sampled tokens terms of the loss use (``algorithm.terms``).

    Its engines are those of a generator that does not sample: they are watched and replaced alike.
    """

    model_path: str | None = Field(default=None, min_length=1)
    """Hugging Face folder or hub id of the teacher; it has to have the policy's tokenizer. null: ``endpoint``
    says where the teacher is, or it is one that moves (``source``) and begins as ``model.path``."""
    endpoint: TeacherEndpoint | None = None
    """A server that has the teacher, in place of engines of the run's own."""
    source: TeacherSource = FixedSource.FROZEN
    """Which weights it has (``sources`` says whose rollouts it sees): ``frozen`` keeps those it began with;
    ``live`` takes every version of the policy that is published; ``{every: N}`` those that N divides;
    ``{ema: ALPHA}`` the average that the trainer keeps of the policy's weights."""
    sources: tuple[str, ...] = ()
    """Names of the data sources whose rollouts it sees; empty: all. Every source has exactly one teacher."""
    prompt: str | None = None
    """What the teacher reads before a response, where that is not what the policy read: a template in which
    ``$prompt`` is the task's prompt, ``$answer`` its reference and ``$column`` a column of its record, such
    as a hint or a demonstration. ``$sibling`` is another response of the group that was correct, and
    ``$feedback`` what the reward has said about this one; where there is none the teacher is not asked
    (``teacher/num_without_sibling``, ``teacher/num_without_feedback``), and no term that needs it counts. The
    response's tokens stay the same. null: the policy's own prompt."""
    max_context_length: Count | None = None
    """Most tokens that it reads, and one more; null: ``model.max_context_length`` + 1."""
    engine: GeneratorSection = GeneratorSection(keep_in_flight=False)
    """Its engines: the same settings as ``generator``."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """Attempts at a group; after this many failures it is given up (``dropped/unscored``). What was lost with
    an engine counts too; waiting for a server that is down does not."""

    @property
    def shows_sibling(self) -> bool:
        """Whether it reads a response that was correct."""
        return SIBLING in self._names

    @property
    def shows_feedback(self) -> bool:
        """Whether it reads what the reward has said."""
        return FEEDBACK in self._names

    @property
    def shows_only_sibling(self) -> bool:
        """Whether a right response is all of a group that it reads: worked examples can have that too."""
        return self.shows_sibling and not self.shows_feedback

    @property
    def needs_scores(self) -> bool:
        """Whether what it reads depends on the scores of the group."""
        return self.shows_sibling or self.shows_feedback

    @property
    def _names(self) -> list[str]:
        """What its prompt names."""
        return [] if self.prompt is None else string.Template(self.prompt).get_identifiers()

    @property
    def num_engines(self) -> int:
        """Engines that the run starts for it."""
        return 0 if self.endpoint is not None else self.engine.num_engines

    def path(self, policy: str) -> str:
        """Folder or hub id of the model that its engines begin with; ``policy`` is ``model.path``."""
        return self.model_path or policy

    @property
    def moves(self) -> bool:
        """Whether its weights change during a run."""
        return self.source is not FixedSource.FROZEN

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if self.moves:
            if self.endpoint is not None:
                what = "must be null: a server keeps its own weights; with an endpoint source must be frozen"
                raise PydanticCustomError("teacher", "endpoint {what}", {"what": what})
            return self
        if (self.model_path is None) == (self.endpoint is None):
            raise PydanticCustomError("teacher", "must have either model_path or endpoint")
        return self


def average_alpha(teachers: Mapping[str, TeacherSection]) -> float | None:
    """What the trainer averages with; None: no teacher follows an average. Rules see to it that all of them
    have the same."""
    sources = (teacher.source for teacher in teachers.values())
    return next((source.ema for source in sources if isinstance(source, AveragedPolicy)), None)


def num_averages(teachers: Mapping[str, TeacherSection]) -> int:
    """How many averages of what is trained the trainer keeps and publishes: 0 or 1."""
    return int(average_alpha(teachers) is not None)


def weights_of_teacher(weights: WeightsSection) -> WeightsSection:
    """How versions get into a teacher's engines, where ``weights`` says it of the generators' engines.

    No score mixes two versions: what runs at a swap is computed again, from its first token.
    """
    changes = {"interruption": Interruption.IN_FLIGHT, "kv_cache": KvAfterSwap.RECOMPUTE}
    return weights.model_copy(update=changes)
