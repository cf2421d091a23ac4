"""Which objective a trainer is asked for, as data that travels to its procs."""

from dataclasses import dataclass

from forgeasync.algorithms.objectives import Objective, ppo_clip, supervised


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoClip:
    """``forgeasync.algorithms.objectives.ppo_clip`` with these bounds."""

    clip_low: float
    clip_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """``forgeasync.algorithms.objectives.supervised``."""


ObjectiveChoice = PpoClip | Supervised


def build_objective(choice: ObjectiveChoice) -> Objective:
    """The callable of a choice."""
    match choice:
        case PpoClip(clip_low=clip_low, clip_high=clip_high):
            return ppo_clip(clip_low, clip_high)
        case Supervised():
            return supervised()
