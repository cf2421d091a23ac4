"""On-policy distillation: the policy learns from what teachers say of its own responses.

    python -m apps.distill --config FILE [--config FILE ...] [key.path=value ...]
        [--dry-run | --resume latest]

The loops are those of apps/grpo.py. A sampled group is seen by the teacher of its source before the buffer
takes it; terms of the loss (algorithm.terms) then compare the teacher's log-probabilities with the policy's
own. Rewards are logged, and evaluations count them; with `objective: {kind: none}` they train nothing, with
any other objective policy gradient and distillation add up.
"""

import sys

from apps.grpo import start
from forgeasync.config import RunConfig, load_config
from forgeasync.controller import exit_code, parse_arguments, show_plan
from forgeasync.schema import ConfigError, Problem


def require_teacher(config: RunConfig) -> None:
    """Raise ConfigError where nothing in the config asks a teacher."""
    if not config.algorithm.needs_teacher:
        kinds = [term.kind for term in config.algorithm.terms]
        remedy = "asks no teacher; must list sampled_reverse_kl or topk_kl (without teachers: apps.grpo)"
        raise ConfigError([Problem(field="algorithm.terms", value=kinds, remedy=remedy)])


def main() -> int:
    """Run the command line; returns the exit code."""
    arguments = parse_arguments("On-policy distillation.", dry_run=True, resume=True)

    def run() -> None:
        config = load_config(arguments.config, arguments.overrides)
        require_teacher(config)
        if arguments.dry_run:
            show_plan(config, gpu_gib=arguments.gpu_gib)
        else:
            start(config, arguments.resume)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
