"""Serves people with the newest policy while it trains on what they say of it.

    python -m apps.serve --config FILE [--config FILE ...] [key.path=value ...]
        [--dry-run | --resume latest]

It is the run of apps/grpo.py, whose tasks are people. Its loops mean here:

    collect   puts an episode on offer whenever the buffer lets one start           waits: bounds
    serve     gives a client that opens a session the oldest offer; without one the
              session is served all the same and is not trained on                 waits: nobody
    score     feedback, your own verdict or a judge, when a session has ended        waits: the person
    train     takes the sessions that have a score, makes an optimizer step          waits: score
    weights   every further token of every session is sampled under the newest       waits: train

Serving never waits for training; training waits for people, because there is nothing else to train on.
docs/serving.md says what clients do, and what becomes of their sessions.
"""

import sys

from apps.grpo import start
from forgeasync.config import RunConfig, is_served, load_config
from forgeasync.controller import exit_code, parse_arguments, show_plan
from forgeasync.schema import ConfigError, Problem


def checked(config: RunConfig) -> RunConfig:
    """Return the config of a run that serves people.

    Raises:
        ConfigError: it serves nobody.
    """
    if is_served(config):
        return config
    given = None if config.data.source is None else config.data.source.kind
    remedy = "must be 'served' to serve people; python -m apps.grpo trains on other data"
    raise ConfigError([Problem(field="data.source.kind", value=given, remedy=remedy)])


def main() -> int:
    """Run the command line; returns the exit code."""
    arguments = parse_arguments("Serve people and train on it.", dry_run=True, resume=True)

    def run() -> None:
        config = checked(load_config(arguments.config, arguments.overrides))
        if arguments.dry_run:
            show_plan(config, gpu_gib=arguments.gpu_gib)
        else:
            start(config, arguments.resume)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
