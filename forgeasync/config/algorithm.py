"""The ``algorithm`` section: how rewards become gradients.

Its parts are the classes of ``forgeasync.algorithms``; ``forgeasync.config.algorithm_rules`` checks which of
them can be combined.
"""

from typing import Any

from pydantic import model_validator

from forgeasync.algorithms import AnyAdvantage, AnyFilter, GroupPassAtK, Grpo, Loss, StepCredit
from forgeasync.schema import Count


class AlgorithmSection(Loss):
    """How rewards become gradients: filters, advantages and the loss."""

    advantage: AnyAdvantage = Grpo()
    """How rewards become advantages. A kind without other keys can be given by its name alone."""
    step_credit: StepCredit = StepCredit.SUM_TO_GO
    """How rewards of steps (``Score.steps``) become advantages of tokens."""
    pass_at_k: Count | None = None
    """k of ``advantage: group_pass_at_k``; after reading, it is a key of that section and null here."""
    group_size: Count
    """Rollouts per prompt."""
    groups_per_step: Count
    """Prompts per batch."""
    filters: tuple[AnyFilter, ...] = ()
    """Filters for every scored group, applied in this order; what they drop is counted."""
    max_filtered_in_a_row: Count = 512
    """The run ends with an error once filters have dropped this many groups in a row."""

    @model_validator(mode="before")
    @classmethod
    def _read_pass_at_k(cls, values: Any) -> Any:
        """Move ``pass_at_k`` beside ``advantage: group_pass_at_k`` into that section."""
        if not isinstance(values, dict):
            return values
        # After this validator pydantic treats the values as Python objects, and its strict mode then wants
        # tuples instead of lists.
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        advantage = values.get("advantage")
        kind = advantage["kind"] if isinstance(advantage, dict) and "kind" in advantage else advantage
        if kind == GroupPassAtK.model_fields["kind"].default and values.get("pass_at_k") is not None:
            others = advantage if isinstance(advantage, dict) else {"kind": kind}
            values["advantage"] = others | {"pass_at_k": values.pop("pass_at_k")}
        return values
