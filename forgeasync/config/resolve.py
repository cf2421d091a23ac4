"""A run's settings once its model is known."""

from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import RoutingReplay, RunConfig


def resolve(config: RunConfig, facts: ModelFacts) -> RunConfig:
    """The config as the run uses it: a model without experts has no routing to record and replay."""
    if facts.num_experts:
        return config
    changes = {"routing_replay": RoutingReplay.OFF, "replay_probe_share": 0.0}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
