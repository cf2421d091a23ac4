"""Sizes that follow from a run's config and its model, and rules that both must satisfy together."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from operator import itemgetter

from forgeasync.config import (
    EXPERT_TARGETS,
    Dtype,
    Fidelity,
    LoraSection,
    ModelFacts,
    OnBadStep,
    RouterBias,
    RoutingReplay,
    RunConfig,
    YarnRope,
    check_without_model,
    longest_response,
    num_groups_held,
)
from forgeasync.models.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from forgeasync.models.family import Family, Shape
from forgeasync.models.glm4_moe import GLM4_MOE
from forgeasync.models.gpt_oss import GPT_OSS
from forgeasync.models.llama import LLAMA
from forgeasync.models.qwen3 import QWEN3, QWEN3_5, QWEN3_MOE
from forgeasync.schema import Problem, Refusal, refuse

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (QWEN3, QWEN3_MOE, *QWEN3_5, LLAMA, DEEPSEEK_V3, KIMI_K2, GLM4_MOE, GPT_OSS)
}
"""Families by ``model_type``. To add one, add a file beside this one and its name here."""


def expected_shapes(facts: ModelFacts) -> dict[str, Shape]:
    """Return the shapes of all weights of a model by their Hugging Face names."""
    layer_shapes = FAMILIES[facts.model_type].layer_shapes
    vocabulary, prefix = (facts.vocab_size, facts.hidden_size), facts.checkpoint_prefix
    shapes: dict[str, Shape] = {f"{prefix}embed_tokens.weight": vocabulary}
    for index in range(facts.num_layers):
        of_layer = layer_shapes(facts, index)
        shapes |= {f"{prefix}layers.{index}.{name}": shape for name, shape in of_layer.items()}
    shapes[f"{prefix}norm.weight"] = (facts.hidden_size,)
    if not facts.tie_word_embeddings:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def is_untrained(name: str, facts: ModelFacts) -> bool:
    """Return whether a tensor of a checkpoint is exported as it is, like those of vision towers."""
    if any(fnmatchcase(name, pattern) for pattern in FAMILIES[facts.model_type].unused):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - facts.num_layers < facts.num_mtp_layers


LOGITS_CHUNK_TOKENS = 1024
"""Number of tokens of a row whose logits exist at the same time in the trainer."""

GATHER_COST = 64
"""Time per logit computed by gathering rows of the output matrix, relative to one of a matrix product.

Forward and backward together; 55 to 75 was measured on a CPU core, for rows of 1,024 in float32.
"""

GATHER_BLOCK_BYTES = 8 * 2**20
"""Bytes of rows of the output matrix and of hidden states that are gathered at once for kept logits.

Blocks that fit into the caches take a fifth of the time. They also avoid returning memory to the system,
which is slow to get again.
"""

PAYLOAD_OVERHEAD_BYTES = 1024
"""Upper bound in bytes of one payload's header, table, alignment and share of the file's last page."""

CPU_KV_BLOCK_TOKENS = 128
"""Tokens of a block of the KV cache on CPUs (``CpuPlatform`` of vLLM 0.32)."""

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions of attention on CPUs (``CPUAttentionBackend`` of vLLM 0.32)."""

BYTES_PER_ELEMENT = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2}
"""Bytes of one number of each dtype."""


def kv_bytes_per_token(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of KV cache per token on one generator rank, of layers that keep all tokens.

    With more ranks than KV heads, every rank holds one head. Latents of latent attention are replicated on
    every rank. (vLLM's CPU build expands them, but reports a cache that is too small for that.)
    """
    if facts.latent is not None:
        latent_size = facts.latent.kv_rank + facts.latent.rope_head_dim
        return facts.num_layers * latent_size * BYTES_PER_ELEMENT[config.generator.dtype]
    return _cached_bytes(config, facts, facts.num_full_layers)


def _cached_bytes(config: RunConfig, facts: ModelFacts, num_layers: int) -> int:
    """Return the bytes of a token's keys and values in some layers."""
    heads_per_rank = max(1, facts.num_kv_heads // config.generator.tensor_parallel)
    return 2 * num_layers * heads_per_rank * facts.head_dim * BYTES_PER_ELEMENT[config.generator.dtype]


def _window_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of a sequence's keys and values in windows.

    Also those of the tokens of two forward passes before them, which vLLM frees afterwards.
    """
    if not facts.window:
        return 0
    num_tokens = facts.window - 1 + 2 * config.generator.max_num_batched_tokens
    # A window begins and ends within a block.
    num_tokens = min(num_tokens, config.model.max_context_length) + 2 * CPU_KV_BLOCK_TOKENS
    return num_tokens * _cached_bytes(config, facts, facts.num_windowed_layers)


def recurrent_state_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of a sequence's states of linear attention, and of a copy in the prefix cache."""
    linear = facts.linear
    if linear is None:
        return 0
    state = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
    inputs = (linear.width - 1) * linear.num_channels
    num_layers = facts.num_layers - facts.num_full_layers
    return 2 * num_layers * (state + inputs) * BYTES_PER_ELEMENT[Dtype.FLOAT32]


def published_dtype(config: RunConfig) -> Dtype:
    """Return the dtype in which generators fetch a version: adapters are small, and merged in float32."""
    return config.generator.dtype if config.lora is None else Dtype.FLOAT32


def version_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of one version that generators fetch: all weights, or the adapters."""
    if config.lora is None:
        num_elements = sum(math.prod(shape) for shape in expected_shapes(facts).values())
    else:
        num_elements = num_adapter_parameters(facts, config.lora)
    return num_elements * BYTES_PER_ELEMENT[published_dtype(config)]


def num_adapter_parameters(facts: ModelFacts, lora: LoraSection) -> int:
    """Return the number of parameters of all adapters: rank * (inputs + outputs) of each adapted matrix."""
    return sum(
        lora.rank * sum(shape)
        for name, shape in expected_shapes(facts).items()
        if name.removesuffix(".weight").rpartition(".")[2] in lora.targets
    )


def largest_group_payload_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes to reserve for the arrays of one group in the payload store.

    This assumes the longest prompt and response in every rollout, no shared prompt record, and kept sets of
    size top_k. Only ties can need more, because CPU engines keep all logits that tie at rank top_k. With a
    teacher, the group is written a second time, with the teacher's arrays, before the first file is freed.
    """
    context, response = config.model.max_context_length, longest_response(config)
    per_token = 4 + routing_bytes_per_token(config, facts)
    per_response_token = 4 + kept_bytes_per_token(config, facts) + sampled_mark_bytes_per_token(config)
    rollout = context * per_token + response * per_response_token + 2 * PAYLOAD_OVERHEAD_BYTES
    if config.algorithm.needs_teacher:
        rollout = 2 * rollout + response * teacher_bytes_per_token(config) + PAYLOAD_OVERHEAD_BYTES
    return config.algorithm.group_size * rollout


def teacher_bytes_per_token(config: RunConfig) -> int:
    """Return the bytes of a teacher's arrays for one response token; 0 without a teacher."""
    if not config.algorithm.needs_teacher:
        return 0
    return 4 + 4 + config.algorithm.num_teacher_ids * (4 + 4)


def sampled_mark_bytes_per_token(config: RunConfig) -> int:
    """Return the bytes per response token that mark it as sampled in a payload; 0 if all are sampled."""
    return 0 if config.environment is None else 1


def routing_bytes_per_token(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of one token's routing record in a payload; 0 if it is not recorded."""
    if config.trainer.routing_replay is RoutingReplay.OFF:
        return 0
    bytes_per_id = 1 if facts.num_experts <= 256 else 2
    return facts.num_moe_layers * facts.top_k * bytes_per_id + 1


def kept_bytes_per_token(config: RunConfig, facts: ModelFacts) -> int:
    """Return the maximum bytes of a response token's kept set in a payload; 0 if it is not recorded.

    This ignores ties at rank top_k, as ``largest_group_payload_bytes`` does.
    """
    if not (config.trainer.keep_sampling_mask and config.sampling.cuts_vocabulary):
        return 0
    return 4 + 4 * (config.sampling.top_k or facts.vocab_size)


def check_nucleus(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Check that top_p can keep more than one token: the most likely one has at least 1 / vocab_size."""
    top_p = config.sampling.top_p
    if facts.vocab_size > 1 and top_p * facts.vocab_size <= 1.0:
        yield (
            "sampling.top_p",
            f"must be greater than 1 / {facts.vocab_size} (the vocabulary): otherwise only the most "
            "likely token is ever kept, its probability is 1, and it gives no gradient",
        )


def _config_key(facts: ModelFacts, *names: str) -> str:
    """Return the first of ``names`` that the model's family has in config.json."""
    sizes = FAMILIES[facts.model_type].sizes(facts)
    return next((name for name in names if name in sizes), names[0])


def _num_experts_key(facts: ModelFacts) -> str:
    """Return the key of the number of experts in config.json."""
    return _config_key(facts, "num_experts", "n_routed_experts", "num_local_experts")


def _expert_size_key(facts: ModelFacts) -> str:
    return _config_key(facts, "moe_intermediate_size", "intermediate_size")


def check_trainer_divides_model(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Check that heads, experts and feed-forward networks divide evenly over the trainer's ranks."""
    parallel = config.trainer.parallel
    sizes = {
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "intermediate_size": facts.dense_hidden_size,
    }
    if facts.num_experts and parallel.expert == 1:
        # Without expert parallelism, every expert is split.
        sizes[_expert_size_key(facts)] = facts.expert_hidden_size
    if facts.routing is not None:
        sizes["n_shared_experts * moe_intermediate_size"] = facts.shared_hidden_size
    yield from _must_divide("trainer.parallel.tensor", parallel.tensor, sizes)
    multiple = 16 // BYTES_PER_ELEMENT[config.trainer.dtype]
    of_experts = {"hidden_size": facts.hidden_size, _expert_size_key(facts): facts.expert_hidden_size}
    for name, size in of_experts.items():
        if facts.num_experts and size % multiple:
            # torch's grouped matrix product needs rows of whole 16 bytes.
            remedy = f"its config.json has {name} = {size}; must be a multiple of {multiple} for its experts"
            yield "model.path", remedy
    if parallel.expert > 1 and not facts.num_experts:
        yield (
            "trainer.parallel.expert",
            f"must be 1: a model of model_type {facts.model_type!r} has no experts",
        )
    experts = {_num_experts_key(facts): facts.num_experts}
    yield from _must_divide("trainer.parallel.expert", parallel.expert, experts)


def _must_divide(field: str, value: int, sizes: Mapping[str, int]) -> Iterator[Refusal]:
    for name, size in sizes.items():
        if size % value:
            yield field, f"must divide the model's {name} = {size}"


def check_generator_fits_model(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Check that the model divides evenly over an engine's ranks, and one sequence fits its KV cache."""
    tensor = config.generator.tensor_parallel
    sizes = {"num_attention_heads": facts.num_heads, "intermediate_size": facts.dense_hidden_size}
    # With expert parallelism, each expert is whole on one rank.
    if config.generator.expert_parallel:
        sizes[_num_experts_key(facts)] = facts.num_experts
    elif facts.num_experts:
        sizes[_expert_size_key(facts)] = facts.expert_hidden_size
    yield from _must_divide("generator.tensor_parallel", tensor, sizes)
    # vLLM repeats KV heads when there are more ranks than heads.
    if facts.num_kv_heads % tensor and tensor % facts.num_kv_heads:
        yield (
            "generator.tensor_parallel",
            f"must divide num_key_value_heads = {facts.num_kv_heads} of the model, or be a multiple",
        )
    if config.generator.expert_parallel and not (facts.num_experts and tensor > 1):
        reason = "there is one GPU to an engine, generator.tensor_parallel = 1"
        if not facts.num_experts:
            reason = f"a model of model_type {facts.model_type!r} has no experts"
        yield "generator.expert_parallel", f"must be false: {reason}"
    keys = config.model.max_context_length * kv_bytes_per_token(config, facts)
    needed_gib = (keys + recurrent_state_bytes(config, facts) + _window_bytes(config, facts)) / 2**30
    if config.generator.kv_cache_gib < needed_gib:
        yield (
            "generator.kv_cache_gib",
            f"must be at least {needed_gib:.3g}, "
            f"to hold one sequence of model.max_context_length = {config.model.max_context_length}",
        )


def check_sequence_parallelism(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Refuse parallel layouts in which TorchTitan's MoE layers compute wrong gradients or fail."""
    parallel = config.trainer.parallel
    if facts.num_experts and parallel.tensor > 1 and parallel.sequence != (parallel.expert > 1):
        # TorchTitan 0.3.0 (partial_dtensor): with sequence but without expert parallelism, the gradient of an
        # MoE layer's input is wrong by tens of percent. With expert but without sequence parallelism, it
        # raises "can not redistribute from S(1) to P(sum)".
        yield (
            "trainer.parallel.sequence",
            "with tensor parallelism must be true if trainer.parallel.expert > 1 and false if it is "
            f"1; it is {parallel.expert}, and TorchTitan's gradients would be wrong",
        )


def check_groups_of_experts(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Check that the sizes of grouped routing are consistent."""
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
    yield "model.path", f"its config.json has {remedy}"


def check_router_bias(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Check that router biases can be published, and that they are trained only if the model has them."""
    if facts.routing is not None and config.generator.dtype is not Dtype.FLOAT32:
        # All weights are published in one dtype, and vLLM keeps biases in float32. Rounded biases would
        # choose other experts.
        yield (
            "generator.dtype",
            f"must be float32: routers of model_type {facts.model_type!r} have float32 biases",
        )
    if config.trainer.router_bias is not RouterBias.UPDATED:
        return
    if facts.routing is None:
        yield (
            "trainer.router_bias",
            f"must be frozen: routers of model_type {facts.model_type!r} have no bias that only "
            "chooses experts",
        )
    elif config.lora is not None:
        yield (
            "trainer.router_bias",
            "must be frozen with a lora section: adapters do not carry biases of routers",
        )


def check_lora_family(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Refuse adapters for models with shared experts, which adapters do not support."""
    if config.lora is not None and facts.routing is not None:
        yield (
            "lora",
            f"must be left out: models of model_type {facts.model_type!r} cannot have adapters",
            None,
        )


def check_windows(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Refuse what does not hold for attention with windows and sinks, and for gpt-oss's experts."""
    if not facts.window:
        return
    if config.trainer.share_prefixes:
        yield (
            "trainer.share_prefixes",
            "must be null or false for a model with windows: in trees a token sees its whole past",
        )
    if config.lora is None:
        return
    if targets := set(config.lora.targets) & set(EXPERT_TARGETS):
        yield (
            "lora.targets",
            f"must not have {', '.join(sorted(targets))}: experts of model_type {facts.model_type!r} "
            "have no adapters",
            sorted(config.lora.targets),
        )
    if config.trainer.parallel.tensor > 1:
        yield (
            "trainer.parallel.tensor",
            "must be 1 with lora: TorchTitan 0.3.0 does not split adapters of layers with biases",
        )


def _must_equal(condition: str, rules: Iterable[tuple[str, object, object, str]]) -> Iterator[Refusal]:
    """Yield a problem for each field whose value is not the wanted one, with the reason."""
    for field, value, wanted, reason in rules:
        if value != wanted:
            yield field, f"must be {str(wanted).lower()} {condition}: {reason}"


def check_linear_attention(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Refuse what does not hold for layers with a recurrent state."""
    if facts.linear is None:
        return
    trainer, dtype = config.trainer, config.generator.dtype
    # Trainers on GPUs have bfloat16 (``check_gpus``).
    needed = dtype if trainer.dtype is Dtype.FLOAT32 else Dtype.BFLOAT16
    plan = "its layers are not split by TorchTitan's plan"
    rules = (
        ("trainer.parallel.context", trainer.parallel.context, 1, "a state passes through the whole row"),
        ("trainer.parallel.tensor", trainer.parallel.tensor, 1, plan),
        ("trainer.parallel.expert", trainer.parallel.expert, 1, plan),
        ("trainer.share_prefixes", trainer.share_prefixes or False, False, "a state belongs to one sequence"),
        ("trainer.compile", trainer.compile, False, "its chunks depend on the row"),
        ("generator.tensor_parallel", config.generator.tensor_parallel, 1, "its files' matrices are whole"),
        ("generator.dtype", dtype.value, needed.value, "vLLM's kernels for GPUs refuse float32"),
        (
            "weights.prefix_cache_across_versions",
            config.weights.prefix_cache_across_versions,
            False,
            "cached states would be of older weights",
        ),
        ("fidelity", config.fidelity.value, "replay", "vLLM's kernels of it have other bits"),
    )
    yield from _must_equal("for a model with linear attention", rules)
    if config.lora is not None:
        yield "lora", "must be left out: layers of linear attention have no adapters", None


def check_lora_sharding(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Check that the adapters' rank divides evenly if TorchTitan splits experts over several ranks.

    It does so, in equal parts, if there are more ranks than experts.
    """
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
        yield (
            "lora.rank",
            f"must be a multiple of {shards}: {ranks} ranks share the model's {facts.num_experts} "
            f"experts, so that the adapters of each are split over {shards}",
        )


def check_fidelity(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Refuse what adds up in another order than one engine does, if bits have to be equal."""
    if config.fidelity is not Fidelity.BITWISE:
        return
    trainer, generator = config.trainer, config.generator
    # ``check_gpus`` refuses bfloat16 on CPUs, and float32 on GPUs.
    is_on_gpus = trainer.dtype is Dtype.BFLOAT16
    of_ranks = "several ranks add up parts of a sum"
    rules = (
        ("generator.batch_invariant", generator.batch_invariant, True, "bits must not depend on the batch"),
        ("generator.compile", generator.compile, False, "compiled operators are fused"),
        ("trainer.compile", trainer.compile, False, "compiled operators are fused"),
        ("generator.dtype", generator.dtype.value, trainer.dtype.value, "the trainer has it"),
        ("trainer.cpu_offload", is_on_gpus and trainer.cpu_offload, False, "GPUs have other cosines"),
        ("generator.tensor_parallel", generator.tensor_parallel, 1, of_ranks),
        ("trainer.parallel.tensor", trainer.parallel.tensor, 1, of_ranks),
        ("trainer.parallel.expert", trainer.parallel.expert, 1, of_ranks),
        ("trainer.parallel.context", trainer.parallel.context, 1, "the generator has whole sequences"),
    )
    yield from _must_equal("with fidelity = 'bitwise'", rules)
    if config.lora is not None:
        yield "lora", "must be left out with fidelity = 'bitwise': its layers have no adapters", None
    if facts.routing is not None or facts.window:
        remedy = f"has model_type {facts.model_type!r}, which fidelity = 'bitwise' does not support"
        yield "model.path", remedy
    elif is_on_gpus and not 32 <= facts.head_dim < 256:
        # From 256 on, vLLM 0.32's attention has other tiles for prompts than for single tokens.
        remedy = f"has head_dim = {facts.head_dim}; must be 32 to 255 with fidelity = 'bitwise' on GPUs"
        yield "model.path", remedy


def check_record_execution(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    """Refuse to record an execution in which something depends on more than the record says."""
    if not config.record_execution:
        return
    weights, trainer, generator = config.weights, config.trainer, config.generator
    acted_on = (None, OnBadStep.SKIP)
    of_bad_steps = {
        f"trainer.bad_steps.{name}": value
        for name, value in (("on_nan", trainer.bad_steps.on_nan), ("on_spike", trainer.bad_steps.on_spike))
        if value not in acted_on
    }
    rules = (
        ("fidelity", config.fidelity.value, "bitwise", "bits must not depend on batches"),
        ("trainer.dtype", trainer.dtype.value, "float32", "gradients differ each time on GPUs"),
        ("buffer.keep_groups", config.buffer.keep_groups, True, "the record has the groups' files"),
        (
            "weights.prefix_cache_across_versions",
            weights.prefix_cache_across_versions,
            False,
            "the record does not say which version computed a cached prefix",
        ),
        ("trainer.steps_per_batch", trainer.steps_per_batch, 1, "a step is compared as a whole"),
        *((field, value, "skip", "a step is not undone again") for field, value in of_bad_steps.items()),
    )
    yield from _must_equal("with record_execution", rules)
    if config.teachers:
        yield "teachers", "must be left out with record_execution: they are not recorded", None
    blocks = -(-config.model.max_context_length // CPU_KV_BLOCK_TOKENS) * generator.max_num_seqs + 1
    needed_gib = blocks * CPU_KV_BLOCK_TOKENS * kv_bytes_per_token(config, facts) / 2**30
    if generator.kv_cache_gib < needed_gib:
        yield (
            "generator.kv_cache_gib",
            f"must be at least {needed_gib:.3g} with record_execution: "
            f"generator.max_num_seqs = {generator.max_num_seqs} sequences of model.max_context_length must "
            "fit, so that no cache is computed twice",
        )


def check_cpu_engine(config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Refuse models that engines on CPUs cannot compute."""
    if facts.head_dim not in CPU_HEAD_DIMS:
        remedy = f"has head_dim = {facts.head_dim}; vLLM's CPU build has attention for {CPU_HEAD_DIMS} only"
        yield refuse(config, "model.path", remedy)


def check_config(config: RunConfig, model_facts: ModelFacts) -> list[Problem]:
    """Return all problems of training this model with ``config``; empty if there are none."""
    of_model = (refuse(config, *refusal) for rule in _MODEL_RULES for refusal in rule(config, model_facts))
    return [*check_without_model(config), *of_model]


def check_generator(config: RunConfig, facts: ModelFacts) -> list[Problem]:
    """Return all problems of sampling from this model with ``config``, without training it."""
    rules = (_check_model_shape, check_generator_fits_model)
    return [refuse(config, *refusal) for rule in rules for refusal in rule(config, facts)]


def _check_payload(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    group_bytes = largest_group_payload_bytes(config, facts)
    num_groups = num_groups_held(config)
    needed_gib = num_groups * group_bytes / 2**30
    if config.payload.capacity_gib < needed_gib:
        sets_are_unbounded = config.sampling.cuts_vocabulary and config.sampling.top_k == 0
        yield (
            "payload.capacity_gib",
            f"must be at least {needed_gib:.3g}, to hold {_whose(config)} "
            f"{num_groups} groups at their largest ({group_bytes / 2**20:.3g} MiB each)"
            + ("; sampling.top_k > 0 would bound the recorded kept sets" if sets_are_unbounded else ""),
        )


def _whose(config: RunConfig) -> str:
    """Return the words of an error message that say which groups the payload store must hold."""
    num_steps = config.trainer.recovery.snapshot_every_steps or 1
    if num_steps == 1:
        return "one step's"
    return f"the {num_steps} steps' between two snapshots (trainer.recovery.snapshot_every_steps)"


def _check_model_shape(config: RunConfig, facts: ModelFacts) -> Iterator[Refusal]:
    if facts.top_k > facts.num_experts:
        yield (
            "model.path",
            f"its config.json selects num_experts_per_tok = {facts.top_k} experts; "
            f"must be at most {_num_experts_key(facts)} = {facts.num_experts}",
        )
    if facts.num_heads % facts.num_kv_heads:
        yield (
            "model.path",
            f"its config.json has num_key_value_heads = {facts.num_kv_heads}; "
            f"must divide num_attention_heads = {facts.num_heads}",
        )
    if config.sampling.top_k > facts.vocab_size:
        yield (
            "sampling.top_k",
            f"must be at most the model's vocabulary of {facts.vocab_size} tokens; 0 keeps all",
        )
    limits = {"max_position_embeddings": facts.max_position_embeddings}
    if isinstance(scaling := facts.rope_scaling, YarnRope):
        # vLLM 0.32 has no cosines of later positions.
        length = int(scaling.factor * scaling.original_max_position_embeddings)
        limits["factor * original_max_position_embeddings"] = length
    name, limit = min(limits.items(), key=itemgetter(1))
    if config.model.max_context_length > limit:
        yield (
            "model.max_context_length",
            f"must be at most the model's {name} = {limit}",
        )


_MODEL_RULES: tuple[Callable[[RunConfig, ModelFacts], Iterator[Refusal]], ...] = (
    _check_model_shape,
    check_nucleus,
    check_trainer_divides_model,
    check_sequence_parallelism,
    check_groups_of_experts,
    check_router_bias,
    check_generator_fits_model,
    check_lora_family,
    check_windows,
    check_linear_attention,
    check_lora_sharding,
    check_fidelity,
    check_record_execution,
    _check_payload,
)
