"""Profile of a run: service times of every part, the profile's file, fits and interpolation."""

import bisect
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from forgeasync.schema import MAX_COUNT, ConfigError, Count, CountOrZero, Problem, Procs, Section

MAX_NUMBER = 1e18

Number = Annotated[float, Field(ge=0.0, le=MAX_NUMBER)]

NUM_QUANTILES = 101

_NORMAL_95 = 1.959964


class Estimate(Section):
    """A mean with its 95 % confidence interval.

    A value that was stated instead of measured has ``num_samples: 0``, and is its own interval.
    """

    mean: Number
    low: Number
    high: Number
    num_samples: int = Field(ge=0, le=MAX_COUNT)

    @model_validator(mode="after")
    def _is_interval(self) -> Self:
        if not self.low <= self.mean <= self.high:
            raise ValueError(
                f"low = {self.low:g}, mean = {self.mean:g}, high = {self.high:g}: must ascend in this order"
            )
        return self

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Return the mean of at least one sample, with its normal interval; one sample has an interval of
        length 0.

        Raises ValueError without samples.
        """
        if not samples:
            raise ValueError("an estimate needs at least one sample")
        # Rounding can move a mean out of the range of its samples.
        mean = min(max(statistics.fmean(samples), min(samples)), max(samples))
        half = 0.0
        if len(samples) > 1:
            half = _NORMAL_95 * statistics.stdev(samples) / math.sqrt(len(samples))
        return cls(mean=mean, low=max(0.0, mean - half), high=mean + half, num_samples=len(samples))

    @classmethod
    def stated(cls, value: float) -> Self:
        """Return a value that was not measured."""
        return cls(mean=value, low=value, high=value, num_samples=0)

    def scaled(self, factor: float) -> Self:
        """Return this estimate multiplied by a factor."""
        values = {name: factor * getattr(self, name) for name in ("mean", "low", "high")}
        return self.model_copy(update=values)


class Distribution(Section):
    """Mean and quantiles of a time or a length, at equal steps of probability from 0 to 1."""

    mean: Estimate
    quantiles: tuple[Number, ...] = Field(min_length=2, max_length=10_001)

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        for index, (one, other) in enumerate(zip(self.quantiles, self.quantiles[1:], strict=False)):
            if one > other:
                raise ValueError(
                    f"quantiles[{index}] = {one:g} is more than quantiles[{index + 1}] = {other:g}: they "
                    "must ascend"
                )
        if not self.quantiles[0] <= self.mean.mean <= self.quantiles[-1]:
            raise ValueError(
                f"mean = {self.mean.mean:g} must lie between the lowest quantile, {self.quantiles[0]:g}, and "
                f"the highest, {self.quantiles[-1]:g}"
            )
        return self

    @classmethod
    def of(cls, samples: Sequence[float], *, num_quantiles: int = NUM_QUANTILES) -> Self:
        """Return the empirical distribution of at least one sample. Raises ValueError without samples."""
        mean = Estimate.of(samples)
        ordered = sorted(samples)
        quantiles = [_between(ordered, index / (num_quantiles - 1)) for index in range(num_quantiles)]
        return cls(mean=mean, quantiles=tuple(quantiles))

    @classmethod
    def point(cls, value: float) -> Self:
        """Return the distribution of a stated constant."""
        return cls(mean=Estimate.stated(value), quantiles=(value, value))

    def at(self, probability: float) -> float:
        """Return the quantile of a probability in [0, 1], interpolated linearly."""
        return _between(self.quantiles, probability)

    def scaled(self, factor: float) -> Self:
        """Return the distribution of the variable multiplied by a factor."""
        quantiles = tuple(factor * value for value in self.quantiles)
        return self.model_copy(update={"mean": self.mean.scaled(factor), "quantiles": quantiles})


def _between(ordered: Sequence[float], probability: float) -> float:
    place = probability * (len(ordered) - 1)
    index = min(int(place), len(ordered) - 2) if len(ordered) > 1 else 0
    if len(ordered) == 1:
        return ordered[0]
    low, high = ordered[index], ordered[index + 1]
    # Rounding must not exceed the higher value.
    return min(low + (high - low) * (place - index), high)


FORMAT_VERSION: Final = 12

Text = Annotated[str, Field(max_length=1000)]


class Origin(StrEnum):
    MEASURED = "measured"
    STATED = "stated"
    """Computed from data sheets and papers, listed in ``sources``, for hardware that is not available."""


class DecodePoint(Section):
    """A decode step of one engine, in which every running sequence gets one token."""

    num_running: Count
    num_context_tokens: CountOrZero
    """Mean length of the running sequences, including their prompts."""
    step_s: Estimate


class TrainPoint(Section):
    """An optimizer step, from its rows to the updated weights."""

    num_rows: Count
    """Number of rows of each data rank, which are its microbatches."""
    cost: Number = Field(gt=0.0)
    """Sum over microbatches of the cost of the costliest row, in tokens: those that are computed, padding
    included, and what attention adds (``rollouts.row_cost``)."""
    step_s: Estimate


class Lengths(Section):
    """Token counts of the prompts and responses of one data source."""

    prompt: Distribution
    response: Distribution
    """Number of sampled tokens of one rollout."""
    prompt_share: float = Field(ge=0.0, le=1.0)
    """Similarity of the lengths of responses to one prompt: the correlation of their normal scores within a
    group. 0: as different as responses to two prompts; 1: all of the same length."""


class WeightTimes(Section):
    """Times of a new version from the trainer to the generators, in order."""

    wait_s: Distribution
    """Seconds that training waits after a step until publishing has begun (``time/publish_weights_s``)."""
    publish_s: Distribution
    """Seconds from then until generators can fetch the version, during the trainer's next step."""
    fetch_s: Distribution
    """Seconds in which the generators of a host fetch and stage it while they decode."""
    swap_s: Distribution
    """Seconds for which an engine pauses to swap."""


class Profile(Section):
    """Service times of each part of a run."""

    format_version: Literal[12] = FORMAT_VERSION
    origin: Origin
    sources: tuple[Text, ...] = ()
    """Sources of stated values."""
    measured_at: Text = ""
    """Date and time of the measurement, ISO 8601; empty in a stated profile."""
    hardware: Text
    """The hosts of the run, or the GPUs of stated times."""
    model: Text
    kv_block_tokens: Count
    """Tokens in a block of an engine's KV cache. Responses share only whole blocks of their prompt."""
    decode: tuple[DecodePoint, ...] = Field(min_length=1, max_length=10_000)
    """Grid of decode steps: every number of sequences with every length of context."""
    prefill_tokens_per_s: Estimate
    """Prompt tokens that one engine computes per second."""
    train: tuple[TrainPoint, ...] = Field(min_length=1, max_length=10_000)
    between_steps_s: Distribution
    """Seconds between two steps outside of waiting for a batch, training, publishing and evaluating:
    recording, planning rows, checkpoints."""
    weights: WeightTimes
    score_s: Distribution
    """Seconds in which a scorer scores one response."""
    score_places: Procs
    """Responses that one scorer scores at once: its workers, or more if rewards wait for servers."""
    lengths: dict[str, Lengths] = Field(min_length=1, max_length=10_000)
    """Lengths by the source's name."""
    filtered_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of scored groups that the filters drop completely."""
    start_s: Estimate
    """Seconds from the command to the first step."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        axes = (
            {one.num_running for one in self.decode},
            {one.num_context_tokens for one in self.decode},
        )
        cells = {(one.num_running, one.num_context_tokens) for one in self.decode}
        if len(cells) != len(self.decode) or len(cells) != len(axes[0]) * len(axes[1]):
            raise ValueError(
                f"decode: {len(self.decode)} points for {len(axes[0])} numbers of sequences and "
                f"{len(axes[1])} lengths of context; must have every pair of them once"
            )
        for field, mean in (
            *((f"decode[{index}].step_s", one.step_s.mean) for index, one in enumerate(self.decode)),
            *((f"train[{index}].step_s", one.step_s.mean) for index, one in enumerate(self.train)),
            ("prefill_tokens_per_s", self.prefill_tokens_per_s.mean),
        ):
            if mean <= 0.0:
                raise ValueError(f"{field}.mean = {mean:g}: must be more than 0")
        for name, lengths in self.lengths.items():
            if lengths.response.quantiles[0] < 1.0:
                raise ValueError(
                    f"lengths.{name}.response.quantiles[0] = {lengths.response.quantiles[0]:g}: must be at "
                    "least 1, as a response has a token"
                )
        if self.origin is Origin.STATED and not self.sources:
            raise ValueError("sources: must say where the figures of a stated profile come from")
        if self.origin is Origin.MEASURED and not self.measured_at:
            raise ValueError("measured_at: must have the time of a measured profile")
        return self


NUM_LENGTH_QUANTILES = 1001
"""Number of quantiles of responses. Their longest hundredth is not spread evenly, and a synchronous step
lasts as long as the longest response of its batch."""


def fit_lengths(prompts: Sequence[float], groups: Sequence[Sequence[float]]) -> Lengths:
    """Return the lengths of one source, from the tokens of its prompts and of each group's responses.

    Raises ValueError without a prompt or a response.
    """
    lengths = [length for group in groups for length in group]
    return Lengths(
        prompt=Distribution.of(prompts),
        response=Distribution.of(lengths, num_quantiles=NUM_LENGTH_QUANTILES),
        prompt_share=_intraclass_correlation(groups),
    )


def _intraclass_correlation(groups: Sequence[Sequence[float]]) -> float:
    """Return the similarity of values within groups of the most frequent size, from 0 to 1.

    It is the intraclass correlation of normal scores by one-way analysis of variance (Shrout and Fleiss 1979,
    ICC(1,1)). Normal scores are the normal quantiles of mid-ranks (Blom 1958). Shape suffixes: N groups, G
    values of a group.
    """
    size = statistics.mode(map(len, groups))
    values_NG = np.array([group for group in groups if len(group) == size])
    if len(values_NG) < 2 or size < 2 or values_NG.min() == values_NG.max():
        return 0.0
    _, places, counts = np.unique(values_NG, return_inverse=True, return_counts=True)
    shares = (counts.cumsum() - (counts - 1) / 2 - 0.375) / (values_NG.size + 0.25)
    normal = statistics.NormalDist()
    scores_NG = np.array([normal.inv_cdf(share) for share in shares])[places].reshape(values_NG.shape)
    between = size * float(scores_NG.mean(axis=1).var(ddof=1))
    within = float(scores_NG.var(axis=1, ddof=1).mean())
    return min(1.0, max(0.0, (between - within) / (between + (size - 1) * within)))


MAX_BYTES = 64 * 2**20


def write_profile(profile: Profile, file: Path) -> None:
    """Write a profile; an existing file is replaced once the new one is complete."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def read_profile(file: Path) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: the file cannot be read, has another version, or has impossible numbers. It names the
            file and every such field.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            raise _refusal(file, f"has more than {MAX_BYTES:,} bytes; must be a profile")
        data = file.read_bytes()
        values = json.loads(data)
    except OSError as error:
        raise _refusal(file, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _refusal(file, f"must be JSON: {error}") from error
    if not isinstance(values, dict) or "format_version" not in values:
        raise _refusal(file, "has no format_version; must be a profile")
    if values["format_version"] != FORMAT_VERSION:
        remedy = f"must be {FORMAT_VERSION}: read the run again with this version of forgeasync"
        raise ConfigError(
            [Problem(field=f"{file}: format_version", value=values["format_version"], remedy=remedy)]
        )
    try:
        return Profile.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise ConfigError(_problems(file, error)) from error


def _refusal(file: Path, remedy: str) -> ConfigError:
    return ConfigError([Problem(field=str(file), remedy=remedy)])


def _problems(file: Path, error: ValidationError) -> Iterator[Problem]:
    for details in error.errors(include_url=False):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
        given = details["input"]
        yield Problem(
            field=f"{file}: {path.removeprefix('.')}",
            value=given if isinstance(given, int | float | str) else None,
            remedy=details["msg"].removeprefix("Value error, "),
        )


def fit_not_negative(terms: np.ndarray, values: np.ndarray) -> list[float]:
    """Return x >= 0 with the least squares of ``terms @ x - values``.

    If several x are equally good, the one with the fewest terms is returned, and of these the one with the
    last terms. All subsets of terms are tried, which is exact (Lawson and Hanson 1974, ch. 23: the solution
    is the unconstrained one of its positive terms) and fast for a few terms.
    """
    num_terms = terms.shape[1]
    best, least = np.zeros(num_terms), float((values**2).sum())
    for size in range(1, min(terms.shape) + 1):
        for chosen in itertools.combinations(reversed(range(num_terms)), size):
            columns = terms[:, chosen]
            solution, _, rank, _ = np.linalg.lstsq(columns, values, rcond=None)
            if rank < size or (solution < 0.0).any():
                continue
            error = float(((columns @ solution - values) ** 2).sum())
            if error < least - 1e-12 * float((values**2).sum()):
                least = error
                best = np.zeros(num_terms)
                best[list(chosen)] = solution
    return [float(one) for one in best]


def powers_of_two(highest: int) -> list[int]:
    """Return 1, 2, 4, ... below ``highest``, and ``highest``."""
    return [*(2**power for power in range((highest - 1).bit_length())), highest]


class DecodeTable:
    """Seconds of a decode step by number of running sequences and mean context, bilinear between points.

    Beyond the points, the line through the last two continues, but never below the nearest point, since a
    step does not get faster with more work. ``num_beyond`` counts the times beyond the largest number of
    sequences.
    """

    def __init__(self, points: Sequence[DecodePoint]) -> None:
        self._running = sorted({one.num_running for one in points})
        self._contexts = sorted({one.num_context_tokens for one in points})
        by_cell = {(one.num_running, one.num_context_tokens): one.step_s.mean for one in points}
        self._steps_s = [
            [by_cell[running, context] for context in self._contexts] for running in self._running
        ]
        self._columns: dict[int, list[float]] = {}
        """Seconds by context, for the numbers of sequences that were requested before."""
        self.num_beyond = 0

    def step_s(self, num_running: int, num_context_tokens: float) -> float:
        """Return the seconds of one step with at least one sequence."""
        assert num_running > 0
        if num_running > self._running[-1]:
            self.num_beyond += 1
        column = self._columns.get(num_running)
        if column is None:
            column = self._columns[num_running] = self._column(num_running)
        return _line(self._contexts, column, num_context_tokens)

    def _column(self, num_running: int) -> list[float]:
        """Return the seconds by context, for a number of sequences."""
        rows = zip(*self._steps_s, strict=True)
        return [_line(self._running, row, num_running) for row in rows]


def _line(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value at a place: linear between ascending places, extrapolated as in ``DecodeTable``."""
    if len(places) == 1 or at <= places[0]:
        return values[0]
    index = min(bisect.bisect_left(places, at), len(places) - 1)
    low, high = places[index - 1], places[index]
    value = values[index - 1] + (values[index] - values[index - 1]) * (at - low) / (high - low)
    return max(value, values[index]) if at > high else value


class TrainTable:
    """Seconds of an optimizer step: fixed + per row + per unit of cost, none of them negative.

    The terms are fitted to the points by least squares of relative errors, so that short steps have as much
    weight as long ones. With too few points for three terms, the simplest fit that is as good is used: cost,
    then fixed, then rows.
    """

    def __init__(self, points: Sequence[TrainPoint]) -> None:
        measured = np.array([one.step_s.mean for one in points])
        terms = np.array([[one.num_rows, 1.0, one.cost] for one in points])
        found = fit_not_negative(terms / measured[:, None], np.ones(len(points)))
        self.row_s, self.fixed_s, self.cost_s = found

    def step_s(self, num_rows: int, cost: float) -> float:
        """Return the seconds of a step with ``num_rows`` rows per data rank."""
        return self.fixed_s + self.row_s * num_rows + self.cost_s * cost
