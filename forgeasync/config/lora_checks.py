"""Rules of the ``lora`` section: what can be adapted, and how adapters are sharded."""

from collections.abc import Iterator

from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.problems import Problem
from forgeasync.config.schema import RunConfig

EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")
ADAPTABLE = ("q_proj", "k_proj", "v_proj", "o_proj", *EXPERT_TARGETS)
"""Linear layers that can have adapters, by the last part of their names."""


def check_lora(config: RunConfig) -> Iterator[Problem]:
    """Targets that are no linear layers of the model, or named twice."""
    if config.lora is None:
        return
    targets = config.lora.targets
    unknown = [target for target in targets if target not in ADAPTABLE]
    if unknown:
        yield Problem(
            field="lora.targets",
            value=unknown[0],
            remedy=f"is no layer that can have an adapter; the model has {', '.join(ADAPTABLE)}",
        )
    twice = [target for target in dict.fromkeys(targets) if targets.count(target) > 1]
    if twice:
        yield Problem(field="lora.targets", value=twice[0], remedy="is there twice; must be there once")


def check_lora_family(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Latent attention and shared experts have layers that adapters here know nothing of."""
    if config.lora is not None and facts.latent is not None:
        yield Problem(
            field="lora",
            remedy=f"must be left out: models of model_type {facts.model_type!r} cannot have adapters",
        )


def check_lora_sharding(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """TorchTitan shards experts over more ranks than there are experts inside of each, in equal parts."""
    if config.lora is None or not facts.num_experts or not set(config.lora.targets) & set(EXPERT_TARGETS):
        return
    parallel = config.trainer.parallel
    shards = parallel.data_shard * parallel.context
    if parallel.expert > 1:
        shards = max(1, shards * parallel.tensor // parallel.expert)
        ranks = shards * parallel.expert
    else:
        ranks = shards * parallel.data_replicate
    if ranks > facts.num_experts and config.lora.rank % shards:
        yield Problem(
            field="lora.rank",
            value=config.lora.rank,
            remedy=f"must be a multiple of {shards}: {ranks} ranks share the model's {facts.num_experts} "
            f"experts, so that the adapters of each are split over {shards}",
        )
