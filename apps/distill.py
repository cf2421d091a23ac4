"""On-policy distillation: the policy learns from what teachers say of its own responses.

    python -m apps.distill --config FILE [--config FILE ...] [key.path=value ...]
        [--dry-run | --resume latest]

The loops are those of apps/grpo.py. The teacher of its source reads a sampled group before the buffer takes
it. Terms of the loss (algorithm.terms) then compare the teacher's log-probabilities with the policy's own.
Rewards are logged, and evaluations count them. With `objective: {kind: none}` they train nothing; with any
other objective, policy gradient and distillation add up.
"""

import sys

from apps.grpo import start
from forgeasync.config import RunConfig
from forgeasync.controller import run_training_app
from forgeasync.schema import ConfigError, Problem


def require_teacher(config: RunConfig) -> None:
    """Raise ConfigError if nothing in the config asks a teacher."""
    if not config.algorithm.needs_teacher:
        kinds = [term.kind for term in config.algorithm.terms]
        remedy = "asks no teacher; must list sampled_reverse_kl or topk_kl (without teachers: apps.grpo)"
        raise ConfigError([Problem(field="algorithm.terms", value=kinds, remedy=remedy)])


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_training_app("On-policy distillation.", start, check=require_teacher)


if __name__ == "__main__":
    sys.exit(main())
