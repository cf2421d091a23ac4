"""Rules about experts and their routers, between a run and its model."""

from collections.abc import Iterator

from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.problems import Problem
from forgeasync.config.schema import RouterBias, RunConfig


def check_sequence_parallelism(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Layouts in which TorchTitan's MoE layers are wrong."""
    parallel = config.trainer.parallel
    if facts.num_experts and parallel.tensor > 1 and parallel.sequence != (parallel.expert > 1):
        # TorchTitan 0.3.0 (partial_dtensor). Sequence parallelism without expert parallelism: the gradient
        # that leaves an MoE layer towards its input is wrong by tens of percent. The other way round: "can
        # not redistribute from S(1) to P(sum)".
        yield Problem(
            field="trainer.parallel.sequence",
            value=parallel.sequence,
            remedy="with tensor parallelism must be true where trainer.parallel.expert > 1 and "
            f"false where it is 1, here {parallel.expert}: otherwise TorchTitan's gradients are wrong",
        )


def check_router_bias(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Only some models have a bias, and only whole weights publish it."""
    if config.trainer.router_bias is not RouterBias.UPDATED:
        return
    if facts.routing is None:
        yield Problem(
            field="trainer.router_bias",
            value=config.trainer.router_bias.value,
            remedy=f"must be frozen: routers of model_type {facts.model_type!r} have no bias",
        )
    elif config.lora is not None:
        yield Problem(
            field="trainer.router_bias",
            value=config.trainer.router_bias.value,
            remedy="must be frozen with a lora section: adapters do not carry biases of routers",
        )
