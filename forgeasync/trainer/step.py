"""Outcome of an optimizer step: its result, the checks that can refuse it, and how a run reacts.

Trainer ranks check a step with ``StepJudge`` before the optimizer changes anything, and all ranks reach the
same decision. The controller counts bad steps (``BadStepMonitor``) and keeps the batches of steps that a
restarted trainer may have to repeat (``StepMemory``).

Shape suffix: T targets of a row.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from forgeasync.config import BadStepsSection, OnBadStep
from forgeasync.models import DEVICE_TYPE
from forgeasync.processes import MemoryPeak
from forgeasync.rollouts import TokenReport, merged_reports
from forgeasync.trainer.packing import PackedRow
from forgeasync.trainer.step_sums import is_fresh
from forgeasync.weights import local_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class BadStep:
    """Reason for refusing an optimizer step, and the configured reaction."""

    reason: str
    remedy: OnBadStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Measurements of the optimizer steps of one batch, over the whole mesh."""

    policy_version: int
    """Version of the weights after the steps."""
    num_targets: int
    """Number of trained tokens."""
    num_padding_tokens: int
    """Number of padding tokens at the ends of rows."""
    num_computed_tokens: int = 0
    """Number of tokens that forward passes computed, shared prefixes once."""
    train_s: float
    """Duration of the steps in seconds."""
    metrics: dict[str, float]
    """Means over the trained tokens of a step, then over the steps, by their names in metrics.jsonl."""
    skip_reason: str | None
    """Reason why a step was not made, or None. If no step was made, the version has the previous weights."""
    is_rolled_back: bool = False
    """Whether weights, moments and random states are those of the batch's start."""
    ends_run: bool = False
    """Whether the config says that such a step ends the run."""
    not_kept: str | None = None
    """Reason why the rows of a bad step could not be written to a file, or None."""
    memory: MemoryPeak | None = None
    """Peak memory of the trainer's largest process so far; None if it was not measured."""
    tokens: TokenReport = field(default_factory=TokenReport)
    """Tokens of this rank's rows, until the ranks' results are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchResult:
    """Measurements of one optimizer step of a batch; ``bad`` has the reason if it is refused or undone."""

    num_targets: int
    num_padding_tokens: int
    num_computed_tokens: int = 0
    metrics: dict[str, float]
    bad: BadStep | None
    tokens: TokenReport = field(default_factory=TokenReport)


def merge_step_results(
    results: Sequence[MinibatchResult],
    *,
    num_steps: int,
    is_rolled_back: bool,
    policy_version: int,
    train_s: float,
) -> StepResult:
    """Merge the results of a batch's steps. Metrics are means over the steps that have them.

    Maxima are the largest values, and numbers of tokens are summed. ``trainer/num_optimizer_steps`` counts
    the steps that were made. The batch has ``num_steps``; steps after one that is rolled back have no result.
    """
    bad = [(number, result.bad) for number, result in enumerate(results, start=1) if result.bad is not None]
    reasons = [
        one.reason if num_steps == 1 else f"step {number} of {num_steps}: {one.reason}" for number, one in bad
    ]
    metrics = _merged_metrics([result.metrics for result in results])
    metrics["trainer/num_optimizer_steps"] = 0.0 if is_rolled_back else float(len(results) - len(bad))
    return StepResult(
        policy_version=policy_version,
        num_targets=sum(result.num_targets for result in results),
        num_padding_tokens=sum(result.num_padding_tokens for result in results),
        num_computed_tokens=sum(result.num_computed_tokens for result in results),
        train_s=train_s,
        metrics=metrics,
        skip_reason="; ".join(reasons) or None,
        is_rolled_back=is_rolled_back,
        ends_run=any(one.remedy is OnBadStep.STOP for _, one in bad),
        tokens=merged_reports([result.tokens for result in results]),
    )


def _merged_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    merged_metrics = {}
    for name in dict.fromkeys(name for metrics in steps for name in metrics):
        values = [metrics[name] for metrics in steps if name in metrics]
        if len(values) == 1:
            merged_metrics[name] = values[0]
        elif name.endswith("_max"):
            merged_metrics[name] = max(values)
        elif name in ("routing/num_without_record", "packing/num_prefix_splits"):
            merged_metrics[name] = sum(values)
        else:
            merged_metrics[name] = math.fsum(values) / len(values)
    return merged_metrics


class NonFiniteWeights(ArithmeticError):
    """Weights or optimizer state contain nan or inf, so they are neither published nor written."""


class MismatchTooLarge(ArithmeticError):
    """The trainer does not compute the distribution that the generators sampled from."""


def agree_on_problem(*problems: str | None) -> str | None:
    """Return a problem of any rank, the same one on every rank; None if no rank has one. Collective.

    Every rank passes the same number of ``problems``, the likeliest cause first. Problems at earlier
    positions take precedence, on any rank. The usual result, None, costs one small all-reduce.
    """
    is_wrong = torch.full((), float(any(text is not None for text in problems)), device=DEVICE_TYPE)
    dist.all_reduce(is_wrong)
    if not is_wrong:
        return None
    found: list[tuple[str | None, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(found, problems)
    return next(text for rank in zip(*found, strict=True) for text in rank if text is not None)


Ranges = Sequence[tuple[str, torch.Tensor]]
"""Names of tensors, with the smallest and largest value of their parts on this rank; nan if any value is."""


@torch.no_grad()
def value_ranges(named: Iterable[tuple[str, torch.Tensor | None]]) -> Ranges:
    """Read every floating-point tensor once, without copying it and without waiting for the device."""
    local = (
        (name, local_shard(tensor))
        for name, tensor in named
        if tensor is not None and tensor.dtype.is_floating_point
    )
    # On a CPU aminmax takes a third of the time of a copy; an infinity norm takes seven times that of one.
    ranges = ((name, torch.stack(torch.aminmax(part)).float()) for name, part in local if part.numel())
    # With offloading some tensors are on the host, others on the device.
    return [(name, ends.to(DEVICE_TYPE)) for name, ends in ranges]


def describe_non_finite(ranges: Ranges) -> str | None:
    """Name the first tensor that is not finite on this rank; None if all are finite."""
    if not ranges or bool(torch.stack([ends for _, ends in ranges]).isfinite().all()):
        return None
    name = next(name for name, ends in ranges if not ends.isfinite().all())
    return f"{name} has values that are nan or infinite {_own_rank()}"


def require_finite(named: Iterable[tuple[str, torch.Tensor]], *, what: str) -> None:
    """Refuse tensors with nan or inf; collective, so that every rank raises or none.

    Raises:
        NonFiniteWeights: A tensor is not finite. The message says that ``what`` is refused, and names the
            tensor.
    """
    problem = agree_on_problem(describe_non_finite(value_ranges(named)))
    if problem is not None:
        raise NonFiniteWeights(f"{what} is refused: {problem}")


RowValues = tuple[int, torch.Tensor, Mapping[str, torch.Tensor | None], torch.Tensor]
"""A row's index and loss, the objective's inputs [T] by name, and the mask of its trained targets."""


def describe_rows(rows: Sequence[RowValues]) -> str | None:
    """Describe the first non-finite value of rows' losses and inputs; None if all are finite.

    A loss can be finite although its inputs, and therefore its gradients, are not: clipping bounds an
    infinite ratio. Waits for the device once.
    """
    is_wrong = [
        torch.stack([~loss.isfinite(), *(one_T.any() for one_T in _non_finite(inputs, mask_T).values())])
        for _, loss, inputs, mask_T in rows
    ]
    if not bool(torch.cat(is_wrong).any()):
        return None
    index, loss, inputs, mask_T = next(row for row, one in zip(rows, is_wrong, strict=True) if one.any())
    described = f"the loss of row {index} {_own_rank()} is {float(loss)}"
    for name, is_wrong_T in _non_finite(inputs, mask_T).items():
        if bool(is_wrong_T.any()):
            values_T = inputs[name]
            assert values_T is not None
            place = int(is_wrong_T.nonzero()[0])
            return f"{described}: {name} of its target {place} is {float(values_T[place])}"
    return f"{described}, although all that the objective is given is finite"


def _non_finite(inputs: Mapping[str, torch.Tensor | None], mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: mask_T & ~values_T.isfinite() for name, values_T in inputs.items() if values_T is not None}


def describe_fresh_mismatch(metrics: Mapping[str, float], largest: float, *, step: int) -> str | None:
    """Describe a mismatch with the generator of more than ``largest`` nats on average; None if there is none.

    Only tokens that were sampled under the weights being trained are compared.
    """
    mismatch = metrics.get("mismatch/fresh_logprob_abs_mean", 0.0)
    if mismatch <= largest:
        return None
    return (
        f"step {step}: on tokens sampled under the very weights that train, log-probabilities of trainer "
        f"and generator differ by {mismatch:.3g} nats on average, more than "
        f"trainer.max_fresh_mismatch = {largest:g}: they do not compute the same distribution "
        "(temperature, kept sets, routing or weights); the step was not taken"
    )


def describe_difference(row: PackedRow, logprobs_T: torch.Tensor, *, index: int) -> tuple[int, str] | None:
    """Describe the first target of row ``index`` with another log-probability than the generator's.

    Only tokens sampled under the weights being trained are compared. Returns the target with its description,
    or None if there is none.
    """
    differs_T = is_fresh(row) & (logprobs_T.cpu().numpy() != row.behavior_logprobs_T)
    if not differs_T.any():
        return None
    first = int(differs_T.argmax())
    sequence = int(row.sequence_ids_T[first])
    name = f"sequence {sequence} of row {index} {_own_rank()}"
    if row.sources:
        key = row.sources[sequence].source.key
        name = f"group {key.rollout.group_id}, rollout {key.rollout.episode}, branch {key.branch}"
    position = int(row.positions_L[row.places_T[first]]) + 1
    token = f"token {row.target_ids_T[first]} at position {position} of {name}"
    given, computed = float(row.behavior_logprobs_T[first]), float(logprobs_T[first])
    return first, (
        f"fidelity = 'bitwise', but the log-probability of {token}, sampled under the weights that train, is "
        f"{given!r} in the generator and {computed!r} in the trainer; {differs_T.sum()} tokens of the row "
        "differ; the step was not made"
    )


def _own_rank() -> str:
    return f"on trainer rank {dist.get_rank()}"


class SpikeRule:
    """Finds gradient norms that are far above those of earlier steps.

    A norm is a spike if it is more than ``factor`` times the median of the last ``window`` norms. Only norms
    above 0 of steps that were made count. Until there are ``window`` of them, nothing is a spike.
    """

    def __init__(self, *, factor: float, window: int) -> None:
        self.window = window
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=window)

    @property
    def norms(self) -> Sequence[float]:
        """Norms that the next one is compared with, oldest first: the whole state of the rule."""
        return list(self._norms)

    def take_over(self, norms: Sequence[float]) -> None:
        """Restore the state that ``norms`` returned."""
        self._norms = deque(norms, maxlen=self.window)

    @property
    def limit(self) -> float | None:
        """Largest norm that is not a spike; None while there are too few norms."""
        if len(self._norms) < self.window:
            return None
        return self._factor * statistics.median(self._norms)

    def describe(self, norm: float) -> str | None:
        """Describe a spike; None if the norm is not one."""
        limit = self.limit
        if limit is None or norm <= limit:
            return None
        return (
            f"the norm of all gradients is {norm:.4g}, more than {limit:.4g}: trainer.bad_steps.spike_factor "
            f"= {self._factor:g} times the median of the last {self.window} steps"
        )

    def made(self, norm: float) -> None:
        """Record the norm of a step that was made."""
        if norm > 0.0:
            self._norms.append(norm)


class StepJudge:
    """Applies ``trainer.bad_steps`` to an optimizer step, before and after it is made."""

    def __init__(self, section: BadStepsSection) -> None:
        self._section = section
        self.spikes: SpikeRule | None = None
        """Rule for spikes; None if ``on_spike`` is not set, so that nothing is a spike."""
        if section.on_spike is not None:
            self.spikes = SpikeRule(factor=section.spike_factor, window=section.spike_window)

    def judge(self, of_rows: str | None, gradients: Ranges, grad_norm: float) -> BadStep | None:
        """Return what is wrong with a step on any rank, the same on all; None if it may be made. Collective.

        ``of_rows`` is the problem of this rank's rows, if any.
        """
        if math.isfinite(grad_norm):
            reason = agree_on_problem(of_rows, None, None)
        else:
            norm = f"the norm of all gradients is {grad_norm}"
            reason = agree_on_problem(of_rows, describe_non_finite(gradients), norm)
        if reason is not None:
            return BadStep(reason=reason, remedy=self._section.on_nan)
        if self.spikes is None:
            return None
        assert self._section.on_spike is not None
        # The last bits of the norm may differ between ranks, so the ranks have to agree on the result.
        reason = agree_on_problem(self.spikes.describe(grad_norm))
        return None if reason is None else BadStep(reason=reason, remedy=self._section.on_spike)

    def judge_weights(self, weights: Ranges) -> BadStep | None:
        """Return what is wrong with the weights after steps, the same on all ranks. Collective."""
        problem = agree_on_problem(describe_non_finite(weights))
        if problem is None:
            return None
        return BadStep(reason=f"of the weights after it: {problem}", remedy=self._section.on_nan)

    def metrics(self) -> dict[str, float]:
        """Return the norm above which the next step is a spike."""
        limit = None if self.spikes is None else self.spikes.limit
        return {} if limit is None else {"grad_norm_limit": limit}

    def made(self, grad_norm: float) -> None:
        """Record the gradient norm of a step that was made."""
        if self.spikes is not None:
            self.spikes.made(grad_norm)


class BadStepsEndRun(RuntimeError):
    """A bad step ends the run, because of too many in a row or because the config says so."""


class BadStepMonitor:
    """Lets a run continue after bad steps, up to a limit."""

    def __init__(self, max_in_a_row: int) -> None:
        """Set the limit ``trainer.bad_steps.max_in_a_row``.

        The run ends with this number of consecutive batches with a bad step.
        """
        assert max_in_a_row > 0
        self._max_in_a_row = max_in_a_row
        self._num_in_a_row = 0

    def count(self, step: int, result: StepResult) -> None:
        """Count a batch.

        Raises:
            BadStepsEndRun: Its bad step reaches the limit, or must end the run at once.
        """
        self._num_in_a_row = 0 if result.skip_reason is None else self._num_in_a_row + 1
        if result.ends_run:
            raise BadStepsEndRun(
                f"step {step} was not made, which ends the run by trainer.bad_steps: {result.skip_reason}"
            )
        if self._num_in_a_row >= self._max_in_a_row:
            raise BadStepsEndRun(
                f"{self._num_in_a_row} steps in a row were bad (trainer.bad_steps.max_in_a_row); "
                f"the last one, {step}, because {result.skip_reason}"
            )


B = TypeVar("B")
"""Batch that a step trains on."""


@dataclass(slots=True)
class StepMemory(Generic[B]):
    """Batches of steps that not all ranks have in a snapshot: a pure state machine.

        begun -> complete -> safe (forgotten)

    A step is complete when its call has returned. It is safe when every rank has a snapshot of its version or
    of a later one. A restarted trainer continues from a snapshot and repeats the complete steps after it in
    the same order, so that a version never names two different sets of weights.
    """

    first_version: int
    """Version that the run begins with; it needs no snapshot to be restored."""
    completed: int = field(init=False)
    """Version of the last complete step."""
    safe_version: int = field(init=False)
    """Newest version that can be restored without training."""
    _batches: dict[int, B] = field(init=False)

    def __post_init__(self) -> None:
        self.completed = self.safe_version = self.first_version
        self._batches = {}

    def begin(self, step: int, batch: B) -> None:
        """Record that a step is being made for the first time."""
        assert step == self.completed + 1, "steps are made in order"
        self._batches[step] = batch

    def complete(self, step: int) -> None:
        """Record that the call of a step has returned."""
        assert step == self.completed + 1 and step in self._batches, "begun, and completed once"
        self.completed = step

    def save(self, version: int) -> None:
        """Record that every rank has a complete snapshot of ``version``.

        A version older than the last safe one changes nothing. The snapshot of a step whose call has not
        returned changes nothing either: if the result is lost, the step is repeated from an older snapshot.
        """
        if not self.safe_version < version <= self.completed:
            return
        self.safe_version = version
        for step in [step for step in self._batches if step <= version]:
            del self._batches[step]

    def after(self, version: int) -> Sequence[tuple[int, B]]:
        """Return the complete steps after ``version``, in order, to be repeated.

        Raises:
            ValueError: ``version`` is not between the newest safe version, before which batches are
                forgotten, and the last complete step.
        """
        if not self.safe_version <= version <= self.completed:
            raise ValueError(
                f"the trainer came back with version {version}; must be one from {self.safe_version}, of "
                f"which every rank had a snapshot, to {self.completed}, the last complete step"
            )
        return [(step, self._batches[step]) for step in range(version + 1, self.completed + 1)]
