"""Writes the metrics of a run: one line per step to metrics.jsonl, and the same to TensorBoard and W&B.

Every key is defined in ``metric_definitions.yaml``. metrics.jsonl has all metrics. Lines that TensorBoard or
W&B do not accept are counted, and the run continues.
"""

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from forgeasync.files import JsonLines, is_refusal
from forgeasync.observability.metric_definitions import REQUIRED_KEYS
from forgeasync.observability.outcome_metrics import HeldOutScores, part_means
from forgeasync.observability.rollout_files import rewards_of
from forgeasync.observability.wandb_log import WandbLog
from forgeasync.rollouts import FinishReason, Group

_LOGGER = logging.getLogger(__name__)

NUM_NONFINITE = "metrics/num_nonfinite"
NUM_TENSORBOARD_ERRORS = "metrics/num_tensorboard_errors"
NUM_WANDB_ERRORS = "metrics/num_wandb_errors"

MAX_KEPT_EVENTS = 1000
"""Maximum number of lines kept for TensorBoard's files while the disk is full or fails."""


def batch_metrics(
    groups: Sequence[Group], *, trained_version: int, max_token_age: int | None = None
) -> dict[str, float | int]:
    """Return metrics of the groups of a step by their names in metrics.jsonl.

    ``trained_version`` is the version of the weights before the step. Tokens older than ``max_token_age``
    were not trained on; their ages count only if all tokens are that old.

    Raises:
        ValueError: A group has no rewards.
    """
    rewards_N = np.array([reward for group in groups for reward in rewards_of(group)], dtype=np.float64)
    parts = part_means([score for group in groups for score in group.scores or ()])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.num_sampled_tokens for rollout in rollouts]
    spans = [span for rollout in rollouts for span in rollout.version_spans]
    ages = [(trained_version - span.version, span.end - span.start) for span in spans]
    ages = [(age, num) for age, num in ages if max_token_age is None or age <= max_token_age] or ages
    num_truncated = sum(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts)
    return {
        "reward/mean": float(rewards_N.mean()),
        "reward/std": float(rewards_N.std()),
        **{f"reward/{name}": mean for name, mean in parts.items()},
        "off_policy/age_mean": sum(age * num for age, num in ages) / sum(num for _, num in ages),
        "off_policy/age_max": max(age for age, _ in ages),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
        "response/truncated_share": num_truncated / len(rollouts),
    }


class _Events:
    """Writes TensorBoard's event files.

    While the disk is full or fails, lines are kept and later written to another file. Some values of such a
    line may then exist twice, because a thread of TensorBoard writes them and does not report which ones
    succeeded. After any other error, nothing more is written.
    """

    def __init__(self, folder: Path, first_step: int | None, say: Callable[[str], None]) -> None:
        self._say = say
        self._folder = folder
        self._first_step = first_step
        self._writer: SummaryWriter | None = None
        self._kept: deque[tuple[Mapping[str, float | int], int]] = deque()
        self._num_lost = 0
        self._is_left_alone = False
        self._has_said = False
        self._flush()

    @property
    def num_errors(self) -> int:
        """Number of lines that are not in the files, including those that may still be written."""
        return self._num_lost + len(self._kept)

    def add(self, values: Mapping[str, float | int], step: int) -> None:
        """Write the kept lines and this one. If too many lines are kept, the oldest one is dropped."""
        self._kept.append((values, step))
        if len(self._kept) > MAX_KEPT_EVENTS or self._is_left_alone:
            self._kept.popleft()
            self._num_lost += 1
        self._flush()

    def _flush(self) -> None:
        if self._is_left_alone:
            return
        try:
            if self._writer is None:
                self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
                # A later file of this process must not purge the lines written before it.
                self._first_step = None
            for values, step in self._kept:
                for key, value in values.items():
                    self._writer.add_scalar(key, value, global_step=step)
            self._writer.flush()
        except OSError as error:
            # TensorBoard's thread failed, possibly at an earlier value of the line.
            self._failed(error)
        else:
            self._kept.clear()
            self._has_said = False

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._failed(error)
            self._writer = None

    def _failed(self, error: OSError) -> None:
        if is_refusal(error):
            what = "their lines are written later"
        else:
            what = "the run continues without them; metrics.jsonl has all numbers"
            self._is_left_alone = True
            self._num_lost += len(self._kept)
            self._kept.clear()
        if not self._has_said:
            reason = f"{type(error).__name__}: {error}"
            self._say(f"TensorBoard's files in {self._folder} cannot be written ({reason}); {what}")
            self._has_said = True
        writer, self._writer = self._writer, None
        if writer is not None:
            # The writer's thread has ended, so closing can raise the same error again.
            with contextlib.suppress(OSError):
                writer.close()


class MetricsWriter:
    """Appends metrics to metrics.jsonl and, if configured, to TensorBoard and W&B."""

    def __init__(
        self,
        metrics_path: Path,
        *,
        tensorboard_dir: Path | None,
        first_step: int | None = None,
        say: Callable[[str], None] = _LOGGER.warning,
        wandb: WandbLog | None = None,
    ) -> None:
        """Open metrics.jsonl and the event files.

        Args:
            metrics_path: Path of metrics.jsonl.
            tensorboard_dir: Folder of TensorBoard's event files; None for none.
            first_step: First step of a resumed run. TensorBoard hides this and later steps of earlier files.
            say: Function that gets a message if TensorBoard's files cannot be written.
            wandb: W&B run that gets the same lines, and is closed with this writer.
        """
        self._wandb = wandb
        self.lines = JsonLines(metrics_path)
        self._events = None if tensorboard_dir is None else _Events(tensorboard_dir, first_step, say)

    def write(self, metrics: Mapping[str, float | int]) -> None:
        """Record one step.

        Raises:
            KeyError: Required keys are missing. The message names them.
        """
        missing = sorted(REQUIRED_KEYS - metrics.keys())
        if missing:
            raise KeyError(f"metrics of a step lack {', '.join(missing)}")
        self._append(metrics)

    def write_initial_evaluation(self, held_out: HeldOutScores, *, eval_s: float) -> None:
        """Record the held-out scores of the initial weights as step 0."""
        self._append(
            {
                "step": 0,
                "policy_version": 0,
                **held_out.metrics(),
                "time/eval_s": eval_s,
                "time/elapsed_s": 0.0,
            }
        )

    def _append(self, metrics: Mapping[str, float | int]) -> None:
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        counts = {NUM_NONFINITE: len(metrics) - len(finite), NUM_TENSORBOARD_ERRORS: 0}
        if self._events is not None:
            counts[NUM_TENSORBOARD_ERRORS] = self._events.num_errors
            self._events.add({**finite, **counts}, int(metrics["step"]))
            counts[NUM_TENSORBOARD_ERRORS] = self._events.num_errors
        if self._wandb is not None:
            counts[NUM_WANDB_ERRORS] = self._wandb.num_errors
            self._wandb.add({**finite, **counts})
            counts[NUM_WANDB_ERRORS] = self._wandb.num_errors
        self.lines.append({**{key: finite.get(key) for key in metrics}, **counts})

    def close(self) -> None:
        """Close all outputs. A second call does nothing."""
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.close()
        self.lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
