"""Rules across fields of a run, and between a run and its model: pure functions that return problems.

Rules of one field alone are bounds in ``forgeasync.config.schema``.
"""

from collections.abc import Callable, Iterator

from forgeasync.config.algorithm_rules import check_algorithm
from forgeasync.config.buffer_checks import check_accounting, check_buffer
from forgeasync.config.data_checks import check_data, check_evaluation, check_response_length
from forgeasync.config.division_checks import check_generator_fits_model, check_trainer_divides_model
from forgeasync.config.interruption_checks import check_interruption
from forgeasync.config.launch_checks import check_launcher
from forgeasync.config.lora_checks import check_lora, check_lora_family, check_lora_sharding
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.number_checks import check_nucleus, check_numbers
from forgeasync.config.problems import Problem
from forgeasync.config.routing_checks import (
    check_groups_of_experts,
    check_router_bias,
    check_sequence_parallelism,
)
from forgeasync.config.schema import RunConfig
from forgeasync.config.scorer_checks import check_scorer
from forgeasync.config.sizes import ROW_ALIGNMENT, largest_group_payload_bytes


def check_config(config: RunConfig, model_facts: ModelFacts) -> list[Problem]:
    """Everything that is wrong with running ``config`` on this model; empty if nothing is."""
    problems = check_without_model(config)
    for rule in _MODEL_RULES:
        problems.extend(rule(config, model_facts))
    return problems


def check_without_model(config: RunConfig) -> list[Problem]:
    """The part of ``check_config`` that needs no model: what can be said before one is built."""
    return [problem for rule in _CONFIG_RULES for problem in rule(config)]


def _check_payload(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    group_bytes = largest_group_payload_bytes(config, facts)
    needed_gib = config.algorithm.groups_per_step * group_bytes / 2**30
    if config.payload.capacity_gib < needed_gib:
        sets_are_unbounded = config.sampling.cuts_vocabulary and config.sampling.top_k == 0
        yield Problem(
            field="payload.capacity_gib",
            value=config.payload.capacity_gib,
            remedy=f"must be at least {needed_gib:.3g}, to hold one step's "
            f"{config.algorithm.groups_per_step} groups at their largest ({group_bytes / 2**20:.3g} MiB each)"
            + ("; sampling.top_k > 0 would bound the recorded kept sets" if sets_are_unbounded else ""),
        )


def _check_lengths(config: RunConfig) -> Iterator[Problem]:
    context = config.model.max_context_length
    yield from check_response_length(config, config.sampling, "sampling")
    if context > config.trainer.tokens_per_row:
        yield Problem(
            field="trainer.tokens_per_row",
            value=config.trainer.tokens_per_row,
            remedy=f"must be at least model.max_context_length = {context}: a sequence must fit a row",
        )


def _check_batch(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    rollouts = algorithm.group_size * algorithm.groups_per_step
    ranks = config.trainer.parallel.data_replicate * config.trainer.parallel.data_shard
    if rollouts < ranks:
        yield Problem(
            field="algorithm.groups_per_step",
            value=algorithm.groups_per_step,
            remedy=f"with group_size = {algorithm.group_size} a step has {rollouts} rollouts; "
            f"must be at least the {ranks} data-parallel ranks of trainer.parallel",
        )
    steps = config.trainer.steps_per_batch
    if algorithm.groups_per_step % steps:
        yield Problem(
            field="trainer.steps_per_batch",
            value=steps,
            remedy=f"must divide algorithm.groups_per_step = {algorithm.groups_per_step}: every optimizer "
            "step takes as many whole groups",
        )
    elif ranks <= rollouts < ranks * steps:
        yield Problem(
            field="trainer.steps_per_batch",
            value=steps,
            remedy=f"an optimizer step has {rollouts // steps} rollouts; must be at least the {ranks} "
            "data-parallel ranks of trainer.parallel",
        )


def _check_generator(config: RunConfig) -> Iterator[Problem]:
    generator = config.generator
    if generator.max_num_batched_tokens < generator.max_num_seqs:
        yield Problem(
            field="generator.max_num_batched_tokens",
            value=generator.max_num_batched_tokens,
            remedy=f"must be at least generator.max_num_seqs = {generator.max_num_seqs}: "
            "a forward pass takes one token of each sequence",
        )


def _check_mesh(config: RunConfig) -> Iterator[Problem]:
    parallel = config.trainer.parallel
    product = parallel.data_replicate * parallel.tensor * parallel.context
    if parallel.num_procs % product:
        yield Problem(
            field="trainer.parallel.num_procs",
            value=parallel.num_procs,
            remedy=f"must be a multiple of data_replicate * tensor * context = {product}",
        )
    else:
        # TorchTitan lays experts over these ranks: what expert parallelism leaves over shards each expert.
        ranks = parallel.data_shard * parallel.tensor * parallel.context
        if ranks % parallel.expert:
            yield Problem(
                field="trainer.parallel.expert",
                value=parallel.expert,
                remedy=f"must divide data_shard * tensor * context = {ranks}, the ranks it borrows",
            )
    if ROW_ALIGNMENT % (parallel.tensor * parallel.context):
        name = "tensor" if parallel.tensor > 1 else "context"
        product = parallel.tensor * parallel.context
        yield Problem(
            field=f"trainer.parallel.{name}",
            value=product // (parallel.context if name == "tensor" else parallel.tensor),
            remedy=f"tensor * context = {product} must divide {ROW_ALIGNMENT}, the multiple that packed rows "
            "are padded to",
        )


def _check_offload(config: RunConfig) -> Iterator[Problem]:
    if config.trainer.cpu_offload and config.lora is not None:
        yield Problem(
            field="trainer.cpu_offload",
            value=config.trainer.cpu_offload,
            remedy="must be false with a lora section: of adapters there is little to offload, and frozen "
            "weights would be copied for every microbatch",
        )


def _check_warmup(config: RunConfig) -> Iterator[Problem]:
    if config.warmup is None:
        return
    shape = config.warmup.shape
    if shape.top_k > shape.num_experts:
        yield Problem(
            field="warmup.shape.top_k",
            value=shape.top_k,
            remedy=f"must be at most warmup.shape.num_experts = {shape.num_experts}",
        )
    if shape.num_heads % shape.num_kv_heads:
        yield Problem(
            field="warmup.shape.num_kv_heads",
            value=shape.num_kv_heads,
            remedy=f"must divide warmup.shape.num_heads = {shape.num_heads}",
        )


def _check_model_shape(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    if facts.top_k > facts.num_experts:
        yield Problem(
            field="model.path",
            value=config.model.path,
            remedy=f"its config.json selects num_experts_per_tok = {facts.top_k} experts; "
            f"must be at most num_experts = {facts.num_experts}",
        )
    if facts.num_heads % facts.num_kv_heads:
        yield Problem(
            field="model.path",
            value=config.model.path,
            remedy=f"its config.json has num_key_value_heads = {facts.num_kv_heads}; "
            f"must divide num_attention_heads = {facts.num_heads}",
        )
    if config.sampling.top_k > facts.vocab_size:
        yield Problem(
            field="sampling.top_k",
            value=config.sampling.top_k,
            remedy=f"must be at most the model's vocabulary of {facts.vocab_size} tokens; 0 keeps all",
        )
    if config.model.max_context_length > facts.max_position_embeddings:
        yield Problem(
            field="model.max_context_length",
            value=config.model.max_context_length,
            remedy=f"must be at most the model's max_position_embeddings = {facts.max_position_embeddings}",
        )


_CONFIG_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _check_lengths,
    _check_batch,
    check_algorithm,
    _check_generator,
    check_interruption,
    check_buffer,
    check_accounting,
    _check_mesh,
    check_numbers,
    _check_offload,
    check_lora,
    check_launcher,
    check_scorer,
    check_data,
    check_evaluation,
    _check_warmup,
)

_MODEL_RULES: tuple[Callable[[RunConfig, ModelFacts], Iterator[Problem]], ...] = (
    _check_model_shape,
    check_nucleus,
    check_trainer_divides_model,
    check_sequence_parallelism,
    check_groups_of_experts,
    check_router_bias,
    check_generator_fits_model,
    check_lora_family,
    check_lora_sharding,
    _check_payload,
)
