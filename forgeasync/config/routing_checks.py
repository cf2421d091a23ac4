"""Rules about experts and their routers, between a run and its model."""

from collections.abc import Iterator

from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.problems import Problem
from forgeasync.config.schema import Dtype, RouterBias, RunConfig


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


def check_groups_of_experts(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Sizes of a grouped choice that do not fit together."""
    routing = facts.routing
    if routing is None:
        return
    per_group = facts.num_experts // routing.num_groups
    limited = f"topk_group = {routing.num_limited_groups}"
    if facts.num_experts % routing.num_groups or (routing.num_groups > 1 and per_group < 2):
        text = f"n_group = {routing.num_groups}; groups of n_routed_experts = {facts.num_experts} must be "
        remedy = text + "equally large, with at least 2 experts each"
    elif routing.num_limited_groups > routing.num_groups:
        remedy = f"{limited}; must be at most n_group = {routing.num_groups}"
    elif routing.num_limited_groups * per_group < facts.top_k:
        remedy = f"{limited}, groups of {per_group} experts; must hold num_experts_per_tok = {facts.top_k}"
    else:
        return
    yield Problem(field="model.path", value=config.model.path, remedy=f"its config.json has {remedy}")


def check_router_bias(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Only some models have a bias, and only whole weights in its own dtype publish it."""
    if facts.routing is not None and config.generator.dtype is not Dtype.FLOAT32:
        # Weights are published in one dtype, but vLLM keeps biases in float32: rounded ones choose others.
        yield Problem(
            field="generator.dtype",
            value=config.generator.dtype.value,
            remedy=f"must be float32: routers of model_type {facts.model_type!r} have float32 biases",
        )
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
