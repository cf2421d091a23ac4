"""Records of steps for what writes and shows them."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from forgeasync.config import RunConfig
from forgeasync.controller import StepTimes
from forgeasync.observability import HeldOutScores, batch_metrics
from forgeasync.rollouts import FinishReason, Group, StoredRollout, Task
from tests.support.config_samples import minimal_config
from tests.support.rollouts import make_stored_rollout

NOW = datetime(2030, 1, 2, 3, 4, 5)


TRAINER = {
    "loss": 0.5,
    "grad_norm": 1.5,
    "mismatch/logprob_abs_mean": 0.003,
    "mismatch/logprob_abs_max": 0.2,
    "mismatch/kl": 1e-4,
}


def make_config(run_dir: Path | None = None) -> RunConfig:
    return minimal_config("name=sums", *([] if run_dir is None else [f"run_dir={run_dir}"]))


def make_rollout(*spans: tuple[int, int, int], truncated: bool = False) -> StoredRollout:
    return make_stored_rollout(
        *spans,
        num_prompt_tokens=5,
        text=f"response of {spans[-1][2]} tokens\nzwölf",
        finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
    )


def make_groups() -> list[Group]:
    tasks = [
        Task(task_id=f"t{i}", prompt=f"{i} + 1 =", answer=str(i + 1), source_index=i, source="s")
        for i in range(2)
    ]
    return [
        Group(
            group_id=7,
            draw_id=7,
            task=tasks[0],
            rollouts=(make_rollout((4, 0, 2)), make_rollout((3, 0, 1), (4, 1, 4))),
            rewards=(1.0, 0.0),
        ),
        Group(
            group_id=8,
            draw_id=8,
            task=tasks[1],
            rollouts=(make_rollout((2, 0, 4)), make_rollout((4, 0, 6), truncated=True)),
            rewards=(0.0, 0.0),
        ),
    ]


def make_held_out(*, accuracy: float) -> HeldOutScores:
    """Of 1,000 responses, with partial credit of a half for every second wrong one."""
    num_correct = round(1000 * accuracy)
    score_sum = num_correct + (1000 - num_correct) / 4
    return HeldOutScores(num_correct=num_correct, score_sum=score_sum, num_scored=1000, num_unscored=24)


def make_step(
    *,
    step: int = 5,
    elapsed_s: float = 60.0,
    trainer: Mapping[str, float] = TRAINER,
    accuracy: float | None = None,
) -> dict[str, float | int]:
    """Metrics of a step."""
    return {
        "step": step,
        "policy_version": step,
        **batch_metrics(make_groups(), trained_version=step - 1),
        **({} if accuracy is None else make_held_out(accuracy=accuracy).metrics()),
        "time/elapsed_s": elapsed_s,
        **StepTimes(step_s=2.0, wait_for_batch_s=0.5, train_s=1.0, publish_weights_s=0.25).metrics(),
        "throughput/train_tokens_per_s": 8.0,
        "throughput/generated_tokens_per_s": 20.0,
        "dropped/too_old": 3,
        **trainer,
    }
