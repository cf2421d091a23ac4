"""Serves users with the newest policy while training it on their feedback.

    python -m apps.serve --config FILE [--config FILE ...] [key.path=value ...]
        [--dry-run | --resume latest]

The loops are those of apps/grpo.py. The tasks are the sessions of users:

    collect   offers an episode whenever the buffer allows one to start               waits: bounds
    serve     assigns the oldest offer to a client that opens a session; without an
              offer the session is served too, but not trained on                     waits: never
    score     scores ended sessions by feedback, your own verdict or a judge          waits: the user
    train     makes an optimizer step on scored sessions                              waits: score
    weights   swaps in the newest weights, also for sessions in progress              waits: train

Serving never waits for training. Training waits for users, because it has no other data. docs/serving.md
describes the protocol of clients and the life of a session.
"""

from apps.grpo import start
from forgeasync.config import RunConfig, is_served
from forgeasync.controller import run_training_app
from forgeasync.observability import exit_with
from forgeasync.schema import ConfigError, Problem


def require_people(config: RunConfig) -> None:
    """Raise ConfigError if the config does not serve users (``data.source.kind: served``)."""
    if not is_served(config):
        given = None if config.data.source is None else config.data.source.kind
        remedy = "must be 'served' to serve people; python -m apps.grpo trains on other data"
        raise ConfigError([Problem(field="data.source.kind", value=given, remedy=remedy)])


def main() -> int:
    """Run the command line; return the exit code."""
    return run_training_app("Serve users and train on their feedback.", start, check=require_people)


if __name__ == "__main__":
    exit_with(main)
