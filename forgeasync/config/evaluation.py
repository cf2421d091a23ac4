"""The sections on sampling and on evaluation, whose sets can be sampled in ways of their own."""

from forgeasync.config.data import NamedSource, NumTasks, Rewards, SourceSection, rewards_of
from forgeasync.config.generator import SamplingSection
from forgeasync.schema.section import Count, Section


class EvaluationSet(Section):
    """Problems that are only evaluated on."""

    name: str
    """Part of its metrics' names, ``eval/<name>/accuracy``."""
    source: SourceSection
    num_problems: NumTasks
    """Drawn from the source as held-out problems are, the same for every run; none is ever trained on."""
    sampling: SamplingSection | None = None
    """How its responses are sampled; null: as in training."""
    reward: Rewards | None = None
    """What scores them; null: what belongs to the source, see ``data.reward``."""


class EvaluationSection(Section):
    """Accuracy on held-out problems, sampled as in training, and on sets of other problems."""

    every_steps: Count = 20
    """Evaluated before the first step, after every this many steps and after the last."""
    num_problems: Count
    """Of the held-out problems."""
    sets: tuple[EvaluationSet, ...] = ()
    """Further problems, evaluated at the same steps."""


def named_sets(evaluation: EvaluationSection) -> tuple[NamedSource, ...]:
    """The sources of all evaluation sets, in the order of the config."""
    return tuple(
        NamedSource(
            # No set is taken for a source of training problems by what counts and scores by source.
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
