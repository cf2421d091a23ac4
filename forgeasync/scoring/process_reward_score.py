"""From the scores of a response's steps to the score of the response. Pure."""

import math
import statistics
from collections.abc import Sequence

from forgeasync.config import ProcessRewardModel, StepsValue
from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score, ScoreStatus, Step
from forgeasync.scoring.response_steps import WrittenSteps, written_steps


def steps_of_response(response: Response, section: ProcessRewardModel) -> WrittenSteps:
    """The steps that a response consists of."""
    is_cut = response.finish_reason is FinishReason.LENGTH
    return written_steps(response.text, section.step_separator, is_cut=is_cut)


def combined(values: Sequence[float], how: StepsValue) -> float:
    """One value from those of at least one step."""
    match how:
        case StepsValue.LAST:
            return values[-1]
        case StepsValue.MINIMUM:
            return min(values)
        case StepsValue.MEAN:
            return statistics.fmean(values)
        case StepsValue.PRODUCT:
            return math.prod(values)


def score_of_steps(
    response: Response, steps: WrittenSteps, values: Sequence[float], section: ProcessRewardModel
) -> Score:
    """The score of a response whose whole steps have these values, one each and at least one.

    A cut step has no reward, and a response that was cut off is not correct.
    """
    value = combined(values, section.value)
    was_cut = response.finish_reason is FinishReason.LENGTH
    return Score(
        value,
        not was_cut and value >= section.correct_from,
        parts={
            "num_steps": float(len(values)),
            "worst_step": min(values),
            "cut_steps": float(steps.has_cut_step),
        },
        steps=tuple(Step(end=step.end, value=one) for step, one in zip(steps.whole, values, strict=True)),
        has_answer=not was_cut,
    )


def score_without_steps(response: Response, *, status: ScoreStatus = ScoreStatus.SCORED) -> Score:
    """The score of a response that has nothing to score, or too much: 0.

    A group trains on rewards of steps only if every response with a text has one, so the whole text is one
    step.
    """
    steps = (Step(end=len(response.text), value=0.0),) if response.text else ()
    return Score(0.0, False, steps=steps, has_answer=False, status=status)
