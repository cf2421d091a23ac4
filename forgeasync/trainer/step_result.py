"""The measurements of the optimizer steps of a batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forgeasync.config import OnBadStep
from forgeasync.process_memory import MemoryPeak
from forgeasync.rollouts import TokenReport, merged_reports


@dataclass(frozen=True, slots=True, kw_only=True)
class BadStep:
    """Why an optimizer step is not made, and what becomes of it."""

    reason: str
    remedy: OnBadStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Measurements of the optimizer steps of one batch, over the whole mesh.

    ``metrics`` are means over the trained tokens of a step, and over the steps (``merged``), under their
    names in metrics.jsonl. ``skip_reason`` says what was wrong where a step was not made; where none was, the
    version has the weights of the one before.
    """

    policy_version: int
    num_targets: int
    num_padding_tokens: int
    train_s: float
    metrics: dict[str, float]
    skip_reason: str | None
    is_rolled_back: bool = False
    """Whether weights, moments and random states are those of the batch's start."""
    ends_run: bool = False
    """Whether the config says that such a step ends the run."""
    not_kept: str | None = None
    """Why the rows of a bad step could not be written to a file."""
    memory: MemoryPeak | None = None
    """Peak of the trainer's largest process so far; None where nobody has measured."""
    tokens: TokenReport = field(default_factory=TokenReport)
    """Of the rows of this rank, until the ranks' results are put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchResult:
    """Measurements of one optimizer step of a batch; ``bad`` says why it is not made, or does not count."""

    num_targets: int
    num_padding_tokens: int
    metrics: dict[str, float]
    bad: BadStep | None
    tokens: TokenReport = field(default_factory=TokenReport)


def merged(
    results: Sequence[MinibatchResult],
    *,
    num_steps: int,
    is_rolled_back: bool,
    policy_version: int,
    train_s: float,
) -> StepResult:
    """The results of a batch's steps as one: metrics are means over the steps that have them.

    Maxima are the largest ones, and numbers of tokens are summed. ``trainer/num_optimizer_steps`` counts the
    steps that were made. The batch has ``num_steps``; those behind one that is rolled back have no result.
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
        elif name == "routing/num_without_record":
            merged_metrics[name] = sum(values)
        else:
            merged_metrics[name] = math.fsum(values) / len(values)
    return merged_metrics
