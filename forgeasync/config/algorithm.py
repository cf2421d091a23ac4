"""The ``algorithm`` section: how rewards become gradients.

Its parts are the classes of ``forgeasync.algorithms``; ``forgeasync.config.algorithm_rules`` says what goes
together.
"""

from typing import Any

from pydantic import model_validator

from forgeasync.algorithms.advantages import AnyAdvantage, GroupPassAtK, Grpo
from forgeasync.algorithms.filters import AnyFilter
from forgeasync.algorithms.loss import Loss
from forgeasync.schema.section import Count


class AlgorithmSection(Loss):
    """How rewards become gradients: from rewards to advantages, and the loss."""

    advantage: AnyAdvantage = Grpo()
    """How a rollout compares with others; a kind without other keys can be given by its name alone."""
    pass_at_k: Count | None = None
    """Given beside ``advantage: group_pass_at_k`` it becomes a key of that section, and null here."""
    group_size: Count
    """Rollouts per prompt."""
    groups_per_step: Count
    """Prompts per batch."""
    filters: tuple[AnyFilter, ...] = ()
    """Applied to every scored group, one after the other; what they drop is counted."""
    max_filtered_in_a_row: Count = 512
    """The run ends with an error once filters have dropped this many groups with none kept between."""

    @model_validator(mode="before")
    @classmethod
    def _read_pass_at_k(cls, values: Any) -> Any:
        """``pass_at_k`` beside ``advantage: group_pass_at_k`` is that advantage's."""
        if not isinstance(values, dict):
            return values
        # Values that a validator has seen count as Python's, and strict validation wants tuples of those.
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        advantage = values.get("advantage")
        kind = advantage["kind"] if isinstance(advantage, dict) and "kind" in advantage else advantage
        if kind == GroupPassAtK.model_fields["kind"].default and values.get("pass_at_k") is not None:
            others = advantage if isinstance(advantage, dict) else {"kind": kind}
            values["advantage"] = others | {"pass_at_k": values.pop("pass_at_k")}
        return values
