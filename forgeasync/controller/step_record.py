"""What is known of an optimizer step once it is done."""

from collections.abc import Mapping
from dataclasses import dataclass

from forgeasync.actors.buffer import BufferReport
from forgeasync.buffer.decisions import Batch
from forgeasync.observability.held_out import HeldOutScores
from forgeasync.sampler.stats import EngineStats
from forgeasync.trainer.step_result import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the wall time of a step of the training loop went, in seconds."""

    step_s: float
    wait_for_batch_s: float
    train_s: float
    publish_weights_s: float
    eval_s: float

    def longest(self) -> str:
        """What the loop waited for most, for the console."""
        parts = {
            "batch": self.wait_for_batch_s,
            "train": self.train_s,
            "publish": self.publish_weights_s,
            "eval": self.eval_s,
        }
        name = max(parts, key=parts.__getitem__)
        return f"{name} {parts[name]:.1f}/{self.step_s:.1f}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of a run, complete: the recorder asks nobody for more."""

    step: int
    batch: Batch
    result: StepResult
    times: StepTimes
    engines: tuple[EngineStats, ...]
    """By generator, since each started."""
    buffer: BufferReport
    counters: Mapping[str, float]
    """What else is counted since the run began or holds now, under the names in metrics.jsonl."""
    held_out: HeldOutScores | None
    """None: there was no evaluation after this step."""
