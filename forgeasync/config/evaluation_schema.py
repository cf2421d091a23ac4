"""The sections on sampling and on evaluation, whose sets can be sampled in ways of their own."""

from typing import Annotated

from pydantic import Field

from forgeasync.config.data_schema import NamedSource, NumTasks, Rewards, SourceSection, rewards_of
from forgeasync.config.section import Count, CountOrZero, Section

MIN_TEMPERATURE = 0.01
"""``_MAX_TEMP`` of vLLM 0.32, which raises lower temperatures to it."""


class SamplingSection(Section):
    """The distribution that responses are drawn from."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=2.0)
    """vLLM samples lower ones at 0.01, while the trainer would divide by what is written here; 0 is greedy: a
    token without alternatives has no gradient. vLLM takes no more than 2."""
    top_k: CountOrZero = 0
    """0 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=0.99)
    max_response_tokens: Count
    """A response is cut here and counted as truncated; with an environment, each turn of the model."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A response ends with the token that completes one of these texts, which its own text leaves out."""

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether some tokens cannot be drawn at all."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


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
