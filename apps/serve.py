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
from forgeasync.config import RunConfig, is_served
from forgeasync.controller import run_training_app
from forgeasync.schema import ConfigError, Problem


def require_people(config: RunConfig) -> None:
    """Raise ConfigError if the run that the config describes serves nobody."""
    if not is_served(config):
        given = None if config.data.source is None else config.data.source.kind
        remedy = "must be 'served' to serve people; python -m apps.grpo trains on other data"
        raise ConfigError([Problem(field="data.source.kind", value=given, remedy=remedy)])


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_training_app("Serve people and train on it.", start, check=require_people)


if __name__ == "__main__":
    sys.exit(main())
