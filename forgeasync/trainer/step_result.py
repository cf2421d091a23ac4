"""What an optimizer step reports, apart from TorchTitan, so that whoever reads it need not import it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step measured, over the whole mesh.

    ``metrics`` are means over the trained tokens, under their names in metrics.jsonl. ``skip_reason`` says
    what was not finite where the step was skipped: the version then has the weights of the one before.
    """

    policy_version: int
    num_targets: int
    num_padding_tokens: int
    train_s: float
    metrics: dict[str, float]
    skip_reason: str | None
