"""Takes a batch back: weights, moments and random states become those of its start."""

import dataclasses
from collections.abc import Iterable

import torch

from forgeasync.config import OnBadStep
from forgeasync.trainer.finite import NonFiniteWeights, value_ranges
from forgeasync.trainer.snapshots import Snapshots
from forgeasync.trainer.step_judge import StepJudge
from forgeasync.trainer.step_result import MinibatchResult
from forgeasync.trainer.trainer_state import TrainerState


def roll_back_if_needed(
    results: list[MinibatchResult],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    judge: StepJudge,
    snapshots: Snapshots | None,
    state: TrainerState,
) -> bool:
    """Roll back a batch whose last result says so, or after which ``weights`` are not finite; collective.

    Returns whether it was. What is wrong with the weights is put down in the result of the last step made.
    Nobody may read the weights meanwhile.

    Raises:
        NonFiniteWeights: there is no snapshot of the weights before.
        ValueError: the config says that a step is rolled back, and there is no snapshot.
    """
    made = [index for index, result in enumerate(results) if result.bad is None]
    bad = judge.judge_weights(value_ranges(weights)) if made else None
    step = state.policy_version + 1
    if bad is not None:
        results[made[-1]] = dataclasses.replace(results[made[-1]], bad=bad)
    elif results[-1].bad is None or results[-1].bad.remedy is not OnBadStep.ROLLBACK:
        return False
    if snapshots is None or snapshots.newest != state.policy_version:
        if bad is not None:
            raise NonFiniteWeights(
                f"step {step} is refused, and there is no snapshot before it: {bad.reason}"
            )
        assert results[-1].bad is not None
        raise ValueError(
            f"trainer.bad_steps: step {step} is to be rolled back, and this trainer takes no snapshots; must "
            f"be skip or stop here. It is bad because {results[-1].bad.reason}"
        )
    tensors = state.tensors()
    snapshots.roll_back(tensors)
    state.take_over(tensors)
    return True
