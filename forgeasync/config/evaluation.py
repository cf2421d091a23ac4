"""Section for evaluation: held-out problems, and further sets with their own sampling and rewards."""

import re
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

from pydantic import Field

from forgeasync.config.data import NamedSource, NumTasks, SourceSection, rewards_of
from forgeasync.config.generator import SamplingSection
from forgeasync.config.rewards import Rewards
from forgeasync.schema import Count, CountOrZero, Refusal, Section

RESERVED_SETS = frozenset({"accuracy", "held_out", "score_mean", "num_unscored", "reward"})
"""Names that no set may have: metrics called ``eval/<name>``, and the held-out problems."""


_SET_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,99}", re.ASCII)


class EvaluationSet(Section):
    """Set of problems for evaluation only; they are never trained on."""

    name: str
    """Name of the set in metrics, such as ``eval/<name>/accuracy``."""
    source: SourceSection
    num_problems: NumTasks
    """Number of problems, drawn from the source like held-out problems: the same ones in every run."""
    num_samples: int = Field(default=1, gt=0, le=1024)
    """Responses per problem; accuracy is the mean over all of them, known as avg@k. A small set needs
    several: with 30 problems and one response each, one response changes accuracy by 3 points."""
    sampling: SamplingSection | None = None
    """Sampling of responses to these problems; null: as in training."""
    reward: Rewards | None = None
    """Rewards for these responses; null: the source's default reward, see ``data.reward``."""


class EvaluationMode(StrEnum):
    """Whether training waits for evaluations."""

    BESIDE = "beside"
    """Training continues. An evaluation's responses are sampled under several versions, which are
    recorded."""
    PINNED = "pinned"
    """Training waits, so that all responses of an evaluation are sampled under one version."""


class EvaluationSection(Section):
    """Evaluation of accuracy on held-out problems, sampled as in training, and on further sets of
    problems."""

    mode: EvaluationMode = EvaluationMode.BESIDE
    """``beside``: training continues, and an evaluation's metrics are logged with the step during which it
    ended, with the versions that sampled it (``eval/version_min``, ``eval/version_max``). An evaluation that
    is due while another one runs is skipped (``eval/num_skipped``). ``pinned``: training waits. The
    evaluations before the first step and after the last are always pinned."""

    every_steps: Count = 20
    """Steps between two evaluations; there are also one before the first step and one after the last."""
    num_problems: CountOrZero
    """Number of held-out problems in an evaluation; at most ``data.num_held_out`` (of all sources together).
    0 in a run that serves people, and only there."""
    sets: tuple[EvaluationSet, ...] = ()
    """Further sets of problems, evaluated at the same steps."""

    def find_problems(self) -> Iterator[Refusal]:
        """Yield names of sets that cannot be part of a metric's name."""
        counts = Counter(one.name for one in self.sets)
        for index, one in enumerate(self.sets):
            if counts[one.name] > 1:
                yield f"sets.{index}.name", "is the name of another set too"
            if one.name in RESERVED_SETS or _SET_NAME.fullmatch(one.name) is None:
                yield (
                    f"sets.{index}.name",
                    "becomes part of the metrics eval/<name>/...; must be up to 100 letters, digits, '_', "
                    f"'-' or '.', and none of {', '.join(sorted(RESERVED_SETS))}",
                )


def named_sets(evaluation: EvaluationSection) -> tuple[NamedSource, ...]:
    """List the sources of all evaluation sets, in the order of the config."""
    return tuple(
        NamedSource(
            # The prefix separates a set from sources of training problems in counts and rewards by name.
            name=f"eval/{one.name}",
            source=one.source,
            weight=1.0,
            rewards=rewards_of(one.reward, one.source),
            num_train=0,
            num_held_out=one.num_problems,
            field=f"evaluation.sets.{index}.source",
            reward_field=f"evaluation.sets.{index}.reward",
            num_held_out_field=f"evaluation.sets.{index}.num_problems",
        )
        for index, one in enumerate(evaluation.sets)
    )
