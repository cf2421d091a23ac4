"""Section ``teachers``: models that compute log-probabilities of the tokens that the policy sampled."""

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
"""Placeholder in a teacher's ``prompt`` for another response of the group that was correct."""

FEEDBACK = "feedback"
"""Placeholder in a teacher's ``prompt`` for the reward's feedback on the response."""


class FixedSource(StrEnum):
    """Weights of a teacher that need no number in the config."""

    FROZEN = "frozen"
    """The weights of the teacher's folder or server, until the end of the run."""
    LIVE = "live"
    """The policy's weights: every published version, as in generators."""

    def is_due(self, version: int, *, newest: int) -> bool:
        """Return whether to load ``version``; ``newest`` is the last version that was loaded."""
        return self is FixedSource.LIVE and version > newest


class EveryVersions(Section):
    """The policy's weights, loaded once every ``every`` versions."""

    every: int = Field(gt=0, le=MAX_COUNT)
    """Versions that are multiples of this number are loaded. If such a version was skipped or
    deleted, the next available version is loaded instead."""

    def is_due(self, version: int, *, newest: int) -> bool:
        """Return whether to load ``version``; ``newest`` is the last version that was loaded.

        A version is due if it is the first one at or beyond a multiple of ``every``.
        """
        return version // self.every > newest // self.every


class AveragedPolicy(Section):
    """A moving average of the policy's weights, which the trainer keeps and publishes with every version."""

    ema: float = Field(gt=0.0, lt=1.0)
    """Decay of the average at a step: average = ema * average + (1 - ema) * weights."""

    def is_due(self, version: int, *, newest: int) -> bool:
        """Return whether to load ``version``; ``newest`` is the last version that was loaded."""
        return version > newest


FORMS = "frozen, live, {every: N} with N from 1, or {ema: ALPHA} with ALPHA between 0 and 1"
"""Allowed values of ``source`` of a teacher, for messages."""


def _read(value: Any) -> Any:
    """Read a source by its only key; any error in it is reported as one problem, with ``FORMS``."""
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
    """A teacher behind a vLLM server (``/v1/completions`` with ``prompt_logprobs``)."""

    base_url: str = Field(pattern=r"^https?://[^\s/]+")
    """URL up to ``/v1``, such as ``http://localhost:8000/v1``."""
    model: str = Field(min_length=1)
    """Name of the model on the server."""
    api_key_env: str | None = None
    """Name of the environment variable with the API key, which is never written to a file; null: no key."""
    limit_s: Seconds = 60.0
    """Time limit of one request, in seconds."""
    max_concurrent: int = Field(default=32, gt=0, le=65536)
    """Maximum number of concurrent requests."""
    max_unavailable_s: Seconds = 1800.0
    """Time that a group waits for an unavailable server; then it is dropped (``dropped/unscored``)."""


class TeacherSection(Section):
    """A model whose log-probabilities of sampled tokens are used by terms of the loss (``algorithm.terms``).

    Its engines are generators that do not sample, and are monitored and replaced in the same way.
    """

    model_path: str | None = Field(default=None, min_length=1)
    """Hugging Face folder or hub id of the teacher, which must have the policy's tokenizer. null:
    ``endpoint`` is set, or the weights change (``source``) and begin as those of ``model.path``."""
    endpoint: TeacherEndpoint | None = None
    """Server that runs the teacher, in place of engines of this run."""
    source: TeacherSource = FixedSource.FROZEN
    """Weights of the teacher: ``frozen`` keeps its initial weights; ``live`` loads every published version of
    the policy; ``{every: N}`` loads multiples of N; ``{ema: ALPHA}`` loads the trainer's moving average of
    the policy's weights. (``sources`` selects the rollouts that it scores.)"""
    sources: tuple[str, ...] = ()
    """Names of the data sources whose rollouts it scores; empty: all. Each source has exactly one teacher."""
    prompt: str | None = None
    """Template of the text that the teacher reads before a response: ``$prompt`` is the task's prompt,
    ``$answer`` its reference and ``$column`` a column of its record, such as a hint or a demonstration.
    ``$sibling`` is another response of the group that was correct, and ``$feedback`` the reward's feedback on
    this response. Responses without the sibling or feedback that the template names are not scored
    (``teacher/num_without_sibling``, ``teacher/num_without_feedback``), and terms that need the teacher skip
    them. The response's tokens stay the same. null: the policy's own prompt."""
    max_context_length: Count | None = None
    """Maximum number of tokens that it reads, plus one; null: ``model.max_context_length`` + 1."""
    engine: GeneratorSection = GeneratorSection(keep_in_flight=False)
    """Settings of its engines, as in ``generator``."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """Maximum number of attempts at a group; then the group is dropped (``dropped/unscored``). Attempts lost
    with an engine count; waiting for an unavailable server does not."""

    @property
    def shows_sibling(self) -> bool:
        """Whether the prompt contains a correct response."""
        return SIBLING in self._names

    @property
    def shows_feedback(self) -> bool:
        """Whether the prompt contains the reward's feedback."""
        return FEEDBACK in self._names

    @property
    def shows_only_sibling(self) -> bool:
        """Whether the prompt needs only a correct response, which worked examples can have too."""
        return self.shows_sibling and not self.shows_feedback

    @property
    def needs_scores(self) -> bool:
        """Whether the prompt depends on the scores of the group."""
        return self.shows_sibling or self.shows_feedback

    @property
    def _names(self) -> list[str]:
        """Placeholders in the prompt."""
        return [] if self.prompt is None else string.Template(self.prompt).get_identifiers()

    @property
    def num_engines(self) -> int:
        """Number of engines that the run starts for the teacher."""
        return 0 if self.endpoint is not None else self.engine.num_replicas

    def path(self, policy: str) -> str:
        """Return the folder or hub id of its engines' initial weights; ``policy`` is ``model.path``."""
        return self.model_path or policy

    @property
    def moves(self) -> bool:
        """Whether its weights change during the run."""
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
    """Return the decay of the trainer's moving average, or None if no teacher uses one.

    Rules require the same decay for all teachers.
    """
    sources = (teacher.source for teacher in teachers.values())
    return next((source.ema for source in sources if isinstance(source, AveragedPolicy)), None)


def num_averages(teachers: Mapping[str, TeacherSection]) -> int:
    """Return how many moving averages of the weights the trainer keeps and publishes: 0 or 1."""
    return int(average_alpha(teachers) is not None)


def weights_of_teacher(weights: WeightsSection) -> WeightsSection:
    """Return ``weights`` with the changes for a teacher's engines.

    No score mixes two versions: a request that runs at a swap is recomputed from its first token.
    """
    changes = {"interruption": Interruption.IN_FLIGHT, "kv_cache": KvAfterSwap.RECOMPUTE}
    return weights.model_copy(update=changes)
