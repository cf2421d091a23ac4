"""On-policy distillation: the policy learns from teachers' log-probabilities of responses that it sampled.

    python -m apps.distill --config FILE [--config FILE ...] [key.path=value ...]
        [--dry-run | --resume latest]

The loops are those of apps/grpo.py. Each sampled group is evaluated by the teacher of its data source before
it enters the buffer. Terms of the loss (algorithm.terms) then compare the teacher's log-probabilities with
the policy's. Rewards are logged and used in evaluations. With `objective: {kind: none}` they do not affect
training; with any other objective, the policy gradient and the distillation terms are added.
"""

from apps.grpo import start
from forgeasync.config import RunConfig
from forgeasync.controller import run_training_app
from forgeasync.observability import exit_with
from forgeasync.schema import ConfigError, Problem


def require_teacher(config: RunConfig) -> None:
    """Raise ConfigError if no term of the config's loss needs a teacher."""
    if not config.algorithm.needs_teacher:
        kinds = [term.kind for term in config.algorithm.terms]
        remedy = "has no term of a teacher; add sampled_reverse_kl or topk_kl, or train with apps.grpo"
        raise ConfigError([Problem(field="algorithm.terms", value=kinds, remedy=remedy)])


def main() -> int:
    """Run the command line; return the exit code."""
    return run_training_app("Train a model on a teacher's log-probabilities.", start, check=require_teacher)


if __name__ == "__main__":
    exit_with(main)
