"""Profile of a run, measured or stated: service times of every part, its file, fits and interpolation."""

import bisect
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Final, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from forgeasync.config import ActivationCheckpointing, ModelFacts, RunConfig, longest_response, named_sources
from forgeasync.files import replacing
from forgeasync.models import BYTES_PER_ELEMENT, kv_bytes_per_token
from forgeasync.planning import (
    DEVICE_BYTES_PER_S,
    KV_BLOCK_TOKENS,
    Machine,
    ParameterCounts,
    active_parameters,
    count_parameters,
    generator_parameters_per_rank,
    seconds_of,
    trainer_parameters_per_rank,
    weight_times,
)
from forgeasync.schema import ConfigError, Count, CountOrZero, Problem, Procs, Section

MAX_NUMBER = 1e18

Number = Annotated[float, Field(ge=0.0, le=MAX_NUMBER)]
Positive = Annotated[float, Field(gt=0.0, le=MAX_NUMBER)]

NUM_QUANTILES = 101


class Distribution(Section):
    """Mean and quantiles of a time or a length, at equal steps of probability from 0 to 1."""

    mean: Number
    quantiles: tuple[Number, ...] = Field(min_length=2, max_length=10_001)

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        for index, (one, other) in enumerate(zip(self.quantiles, self.quantiles[1:], strict=False)):
            if one > other:
                raise ValueError(
                    f"quantiles[{index}] = {one:g} is more than quantiles[{index + 1}] = {other:g}: they "
                    "must ascend"
                )
        if not self.quantiles[0] <= self.mean <= self.quantiles[-1]:
            raise ValueError(
                f"mean = {self.mean:g} must lie between the lowest quantile, {self.quantiles[0]:g}, and "
                f"the highest, {self.quantiles[-1]:g}"
            )
        return self

    @classmethod
    def of(cls, samples: Sequence[float], *, num_quantiles: int = NUM_QUANTILES) -> Self:
        """Return the empirical distribution of samples.

        Raises:
            ValueError: There are no samples.
        """
        if not samples:
            raise ValueError("a distribution needs at least one sample")
        ordered = sorted(samples)
        # Rounding can move a mean out of the range of its samples.
        mean = min(max(statistics.fmean(samples), ordered[0]), ordered[-1])
        quantiles = [_between(ordered, index / (num_quantiles - 1)) for index in range(num_quantiles)]
        return cls(mean=mean, quantiles=tuple(quantiles))

    @classmethod
    def point(cls, value: float) -> Self:
        """Return the distribution of a stated constant."""
        return cls(mean=value, quantiles=(value, value))

    def at(self, probability: float) -> float:
        """Return the quantile of a probability in [0, 1], interpolated linearly."""
        return _between(self.quantiles, probability)

    def scaled(self, factor: float) -> Self:
        """Return the distribution of the variable multiplied by a factor."""
        quantiles = tuple(factor * value for value in self.quantiles)
        return self.model_copy(update={"mean": factor * self.mean, "quantiles": quantiles})


def _between(ordered: Sequence[float], probability: float) -> float:
    place = probability * (len(ordered) - 1)
    index = min(int(place), len(ordered) - 2) if len(ordered) > 1 else 0
    if len(ordered) == 1:
        return ordered[0]
    low, high = ordered[index], ordered[index + 1]
    # Rounding must not exceed the higher value.
    return min(low + (high - low) * (place - index), high)


FORMAT_VERSION: Final = 13

Text = Annotated[str, Field(max_length=1000)]


class DecodePoint(Section):
    """A decode step of one engine, in which every running sequence gets one token."""

    num_running: Count
    num_context_tokens: CountOrZero
    """Mean length of the running sequences, including their prompts."""
    step_s: Positive


class TrainPoint(Section):
    """An optimizer step, from its rows to the updated weights."""

    num_rows: Count
    """Number of rows of each data rank, which are its microbatches."""
    cost: Positive
    """Sum over microbatches of the cost of the costliest row, in tokens: those that are computed, padding
    included, and what attention adds (``rollouts.row_cost``)."""
    step_s: Positive


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

    format_version: Literal[13] = FORMAT_VERSION
    sources: tuple[Text, ...] = ()
    """Data sheets and papers of stated values, for hardware that is not available; empty if measured."""
    measured_at: Text = ""
    """Date and time of the measurement, ISO 8601; empty in a stated profile."""
    hardware: Text
    """The hosts of the run, or the GPUs of stated times."""
    model: Text
    kv_block_tokens: Count
    """Tokens in a block of an engine's KV cache. Responses share only whole blocks of their prompt."""
    decode: tuple[DecodePoint, ...] = Field(min_length=1, max_length=10_000)
    """Grid of decode steps: every number of sequences with every length of context."""
    prefill_tokens_per_s: Positive
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
    start_s: Number
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
        for name, lengths in self.lengths.items():
            if lengths.response.quantiles[0] < 1.0:
                raise ValueError(
                    f"lengths.{name}.response.quantiles[0] = {lengths.response.quantiles[0]:g}: must be at "
                    "least 1, as a response has a token"
                )
        return self


NUM_LENGTH_QUANTILES = 1001
"""Number of quantiles of responses. Their longest hundredth is not spread evenly, and a synchronous step
lasts as long as the longest response of its batch."""


def fit_lengths(prompts: Sequence[float], groups: Sequence[Sequence[float]]) -> Lengths:
    """Return the lengths of one source, from the tokens of its prompts and of each group's responses.

    Raises:
        ValueError: There is no prompt or no response.
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
    normal = NormalDist()
    scores_NG = np.array([normal.inv_cdf(share) for share in shares])[places].reshape(values_NG.shape)
    between = size * float(scores_NG.mean(axis=1).var(ddof=1))
    within = float(scores_NG.var(axis=1, ddof=1).mean())
    return min(1.0, max(0.0, (between - within) / (between + (size - 1) * within)))


MAX_BYTES = 64 * 2**20


def write_profile(profile: Profile, file: Path) -> None:
    """Write a profile; an existing file is replaced once the new one is complete."""
    with replacing(file) as out:
        out.write(profile.model_dump_json(indent=1).encode() + b"\n")


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
        by_cell = {(one.num_running, one.num_context_tokens): one.step_s for one in points}
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
        measured = np.array([one.step_s for one in points])
        terms = np.array([[one.num_rows, 1.0, one.cost] for one in points])
        found = fit_not_negative(terms / measured[:, None], np.ones(len(points)))
        self.row_s, self.fixed_s, self.cost_s = found

    def step_s(self, num_rows: int, cost: float) -> float:
        """Return the seconds of a step with ``num_rows`` rows per data rank."""
        return self.fixed_s + self.row_s * num_rows + self.cost_s * cost


# ---- profiles of hardware that is not available, from the model's shape and the manufacturer's data sheet

CONTEXTS = (0, 1_024, 4_096, 16_384, 65_536)

OPTIMIZER_BYTES = 40
"""Per parameter: reads float32 parameter, gradient and two moments, writes three of them, casts a copy."""

SCORE_S, BETWEEN_S, START_S = 0.05, 0.5, 600.0
"""Assumed seconds of scoring a response, between two steps and of a start; in no data sheet."""

GPU = "H100 SXM 80 GB"
FLOPS_PER_S = 989e12
"""Dense FLOP/s in the compute dtype."""

DECODE_EFFICIENCY = 0.7
"""Share of the bandwidth that a decode step reaches."""

PREFILL_EFFICIENCY = 0.4
"""Share of the FLOP/s that a prefill reaches."""

TRAIN_EFFICIENCY = 0.25
"""Share of the FLOP/s that training reaches, with communication: model FLOPs utilization (Chowdhery et al.,
"PaLM", 2022, appendix B), with recomputed activations counted as work."""

STEP_OVERHEAD_S = 0.003
"""Seconds of a decode step outside of reading and computing."""

SOURCE = (
    "NVIDIA H100 data sheet: 989 TFLOP/s in bfloat16 without sparsity, 3.35 TB/s; efficiencies (decode 70 % "
    "of the bandwidth, prefill 40 % and training 25 % of the FLOP/s) and 3 ms a decode step are assumed"
)


def stated_profile(config: RunConfig, facts: ModelFacts, *, mean_response_tokens: float) -> Profile:
    """Return the profile of a checked config on H100s, which were not measured.

    The time of a decode step is a roofline (Williams, Waterman, Patterson, "Roofline: an insightful visual
    performance model", 2009): the longer of reading and computing, each at a share of the speed in the data
    sheet.

    Lengths of responses are lognormal with this mean, truncated at the longest response that the config
    allows.

    Raises:
        ValueError: the mean is less than 1 or more than the longest response.
    """
    if not 1.0 <= mean_response_tokens <= longest_response(config):
        raise ValueError(
            f"mean_response_tokens = {mean_response_tokens:g} must be from 1 to {longest_response(config)}, "
            "the longest response of the config"
        )
    counts = count_parameters(facts)
    terms = weight_times(config, facts)
    prefill = config.generator.tensor_parallel * FLOPS_PER_S * PREFILL_EFFICIENCY
    prefill /= 2 * active_parameters(facts, counts)
    lengths = _lengths(mean_response_tokens, longest_response(config))
    prompt = Distribution.point(
        float(max(1, min(256, config.model.max_context_length - longest_response(config))))
    )
    return Profile(
        sources=(SOURCE, "bandwidths of weights: forgeasync/planning/weight_times.py"),
        hardware=GPU,
        model=config.model.path,
        kv_block_tokens=KV_BLOCK_TOKENS[Machine.GPU],
        decode=_decode(config, facts, counts),
        prefill_tokens_per_s=prefill,
        train=_train(config, facts, counts),
        between_steps_s=Distribution.point(BETWEEN_S),
        weights=WeightTimes(
            wait_s=Distribution.point(0.0),
            publish_s=Distribution.point(seconds_of("publish", terms)),
            fetch_s=Distribution.point(seconds_of("fetch", terms) + seconds_of("stage", terms)),
            swap_s=Distribution.point(seconds_of(f"pause, shadow: {config.weights.shadow}", terms)),
        ),
        score_s=Distribution.point(SCORE_S),
        score_places=config.scorer.num_workers,
        lengths={
            source.name: Lengths(prompt=prompt, response=lengths, prompt_share=0.5)
            for source in named_sources(config.data)
        },
        start_s=START_S,
    )


def _decode(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> tuple[DecodePoint, ...]:
    generator = config.generator
    per_rank = generator_parameters_per_rank(config, facts, counts)
    element, tensor = BYTES_PER_ELEMENT[generator.dtype], generator.tensor_parallel
    of_experts = per_rank * counts.experts / counts.total
    points = []
    for running in powers_of_two(generator.max_num_seqs):
        # Share of experts that at least one token is routed to, if the router has no preference.
        touched = 1.0
        if facts.num_experts:
            touched = 1.0 - (1.0 - facts.top_k / facts.num_experts) ** running
        weights = (per_rank - of_experts * (1.0 - touched)) * element
        compute_s = 2 * active_parameters(facts, counts) * running / tensor
        compute_s /= FLOPS_PER_S * PREFILL_EFFICIENCY
        for context in CONTEXTS:
            read = weights + running * context * kv_bytes_per_token(config, facts)
            read_s = read / (DEVICE_BYTES_PER_S * DECODE_EFFICIENCY)
            points.append(
                DecodePoint(
                    num_running=running,
                    num_context_tokens=context,
                    step_s=STEP_OVERHEAD_S + max(read_s, compute_s),
                )
            )
    return tuple(points)


def _train(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> tuple[TrainPoint, ...]:
    """Return optimizer steps of several costs.

    The forward pass needs 2 FLOPs for each parameter that a token uses, and for attention as many as
    ``planning.pair_cost`` says. The backward pass needs twice as many, and recomputing activations needs
    another forward pass. The processes of a data rank share its rows.
    """
    trainer = config.trainer
    passes = 4 if trainer.activation_checkpointing is ActivationCheckpointing.FULL else 3
    flops_per_s = trainer.parallel.tensor * trainer.parallel.context * FLOPS_PER_S * TRAIN_EFFICIENCY
    token_s = passes * 2 * active_parameters(facts, counts) / flops_per_s
    optimizer_s = OPTIMIZER_BYTES * trainer_parameters_per_rank(config, counts) / DEVICE_BYTES_PER_S
    return tuple(
        TrainPoint(
            num_rows=num_rows,
            cost=num_rows * trainer.tokens_per_row,
            step_s=optimizer_s + num_rows * trainer.tokens_per_row * token_s,
        )
        for num_rows in (1, 2, 8)
    )


def _lengths(mean: float, longest: int) -> Distribution:
    """Return a lognormal distribution with sigma 0.8 that has this mean after the truncation at ``longest``.

    A mean close to ``longest`` cannot be reached; the distribution then comes as close as possible.
    """
    normal = [NormalDist().inv_cdf((index + 0.5) / NUM_QUANTILES) for index in range(NUM_QUANTILES)]

    def cut(median: float) -> list[float]:
        return [min(float(longest), max(1.0, median * math.exp(0.8 * z))) for z in normal]

    low, high = 1.0, float(longest) * 100.0
    for _ in range(60):
        median = math.sqrt(low * high)
        low, high = (median, high) if sum(cut(median)) / NUM_QUANTILES < mean else (low, median)
    quantiles = cut(high)
    return Distribution(mean=min(quantiles[-1], sum(quantiles) / NUM_QUANTILES), quantiles=tuple(quantiles))
