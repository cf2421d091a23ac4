"""Rules of parallel layouts: what they split has to divide, between a run and its model."""

from collections.abc import Iterator

from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.problems import Problem
from forgeasync.config.schema import RunConfig
from forgeasync.config.sizes import kv_bytes_per_token


def check_trainer_divides_model(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Heads, experts and networks over the trainer's ranks."""
    parallel = config.trainer.parallel
    for name, size in (("num_attention_heads", facts.num_heads), ("num_key_value_heads", facts.num_kv_heads)):
        if size % parallel.tensor:
            yield Problem(
                field="trainer.parallel.tensor",
                value=parallel.tensor,
                remedy=f"must divide the model's {name} = {size}",
            )
    if parallel.expert > 1 and not facts.num_experts:
        yield Problem(
            field="trainer.parallel.expert",
            value=parallel.expert,
            remedy=f"must be 1: a model of model_type {facts.model_type!r} has no experts",
        )
    elif facts.num_experts % parallel.expert:
        yield Problem(
            field="trainer.parallel.expert",
            value=parallel.expert,
            remedy=f"must divide the model's num_experts = {facts.num_experts}",
        )
    if parallel.expert == 1 and facts.expert_hidden_size % parallel.tensor:
        yield Problem(
            field="trainer.parallel.tensor",
            value=parallel.tensor,
            remedy=f"must divide the model's moe_intermediate_size = {facts.expert_hidden_size} "
            "(without expert parallelism it splits every expert)",
        )
    if facts.dense_hidden_size % parallel.tensor:
        yield Problem(
            field="trainer.parallel.tensor",
            value=parallel.tensor,
            remedy=f"must divide the model's intermediate_size = {facts.dense_hidden_size}",
        )
    if facts.routing is not None and facts.shared_hidden_size % parallel.tensor:
        yield Problem(
            field="trainer.parallel.tensor",
            value=parallel.tensor,
            remedy=f"must divide the hidden size {facts.shared_hidden_size} of the model's shared experts",
        )


def check_generator_fits_model(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """The same over an engine's ranks, and whether one sequence fits its KV cache."""
    tensor = config.generator.tensor_parallel
    # With expert parallelism every expert lies whole on one of the ranks.
    experts = ("num_experts", facts.num_experts)
    if not config.generator.expert_parallel:
        experts = ("moe_intermediate_size", facts.expert_hidden_size)
    sizes = (
        ("num_attention_heads", facts.num_heads),
        experts,
        ("intermediate_size", facts.dense_hidden_size),
    )
    for name, size in sizes:
        if size % tensor:
            yield Problem(
                field="generator.tensor_parallel",
                value=tensor,
                remedy=f"must divide the model's {name} = {size}",
            )
    # vLLM repeats KV heads when there are more ranks than heads.
    if facts.num_kv_heads % tensor and tensor % facts.num_kv_heads:
        yield Problem(
            field="generator.tensor_parallel",
            value=tensor,
            remedy=f"must divide the model's num_key_value_heads = {facts.num_kv_heads} or be its multiple",
        )
    if config.generator.expert_parallel and not (facts.num_experts and tensor > 1):
        reason = "there is one GPU to an engine, generator.tensor_parallel = 1"
        if not facts.num_experts:
            reason = f"a model of model_type {facts.model_type!r} has no experts"
        yield Problem(field="generator.expert_parallel", value=True, remedy=f"must be false: {reason}")
    needed_gib = config.model.max_context_length * kv_bytes_per_token(config, facts) / 2**30
    if config.generator.kv_cache_gib < needed_gib:
        yield Problem(
            field="generator.kv_cache_gib",
            value=config.generator.kv_cache_gib,
            remedy=f"must be at least {needed_gib:.3g}, "
            f"to hold one sequence of model.max_context_length = {config.model.max_context_length}",
        )
