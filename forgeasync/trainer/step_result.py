"""The measurements of an optimizer step; what is kept of a skipped step, and how many may be skipped."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forgeasync.process_memory import MemoryPeak
from forgeasync.trainer.packing import PackedRow


def write_skipped_rows(folder: Path, rows: Sequence[PackedRow], *, step: int, rank: int, reason: str) -> Path:
    """Write ``step-<step>-rank-<rank>.npz``, to be read with ``numpy.load``.

    It holds ``reason``, every array of each ``PackedRow`` as ``row<i>.<name>``, and the kept sets as
    ``row<i>.kept_offsets`` and ``row<i>.kept_ids``.
    """
    arrays: dict[str, np.ndarray] = {"reason": np.asarray(reason)}
    for index, row in enumerate(rows):
        for field in dataclasses.fields(row):
            value = getattr(row, field.name)
            if isinstance(value, np.ndarray):
                arrays[f"row{index}.{field.name}"] = value
        arrays[f"row{index}.kept_offsets"] = row.kept_tokens.offsets
        arrays[f"row{index}.kept_ids"] = row.kept_tokens.ids_N
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step-{step:08d}-rank-{rank}.npz"
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file


class StepsSkipped(RuntimeError):
    """Step after step had a loss or gradient that is not finite."""


class SkipWatch:
    """Lets a run go on after a step that was skipped, but not for ever; pure."""

    def __init__(self, limit: int) -> None:
        """``limit`` batches in a row with a skipped step are too many (``trainer.max_skipped_steps``)."""
        assert limit > 0
        self._limit = limit
        self._num_in_a_row = 0

    def count(self, step: int, result: "StepResult") -> None:
        """Take note of a step.

        Raises:
            StepsSkipped: it is one skipped step too many in a row.
        """
        self._num_in_a_row = 0 if result.skip_reason is None else self._num_in_a_row + 1
        if self._num_in_a_row >= self._limit:
            raise StepsSkipped(
                f"{self._num_in_a_row} steps in a row were skipped (trainer.max_skipped_steps); "
                f"the last one, {step}, because {result.skip_reason}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Measurements of the optimizer steps of one batch, over the whole mesh.

    ``metrics`` are means over the trained tokens of a step, and over the steps (``merged``), under their
    names in metrics.jsonl. ``skip_reason`` says what was not finite where a step was skipped; where all of
    them were, the version has the weights of the one before.
    """

    policy_version: int
    num_targets: int
    num_padding_tokens: int
    train_s: float
    metrics: dict[str, float]
    skip_reason: str | None
    memory: MemoryPeak | None = None
    """Peak of the trainer's largest process so far; None where nobody has measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchResult:
    """Measurements of one optimizer step of a batch; ``skip_reason`` says why it was skipped."""

    num_targets: int
    num_padding_tokens: int
    metrics: dict[str, float]
    skip_reason: str | None


def merged(results: Sequence[MinibatchResult], *, policy_version: int, train_s: float) -> StepResult:
    """The results of a batch's steps as one: metrics are means over the steps that have them.

    Maxima are the largest ones, and numbers of tokens are summed. ``trainer/num_optimizer_steps`` counts the
    steps that were made.
    """
    reasons = [
        result.skip_reason if len(results) == 1 else f"step {number} of {len(results)}: {result.skip_reason}"
        for number, result in enumerate(results, start=1)
        if result.skip_reason is not None
    ]
    metrics = _merged_metrics([result.metrics for result in results])
    metrics["trainer/num_optimizer_steps"] = float(len(results) - len(reasons))
    return StepResult(
        policy_version=policy_version,
        num_targets=sum(result.num_targets for result in results),
        num_padding_tokens=sum(result.num_padding_tokens for result in results),
        train_s=train_s,
        metrics=metrics,
        skip_reason="; ".join(reasons) or None,
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
