"""Makes the tiny model of a rehearsal: the same family, fit for the same parallel degrees, random weights."""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from forgeasync.config import GeneratorSection, LatentAttention, ModelFacts, ParallelSection
from forgeasync.models import (
    FAMILIES,
    NUM_CHARACTER_TOKENS,
    Shape,
    character_tokenizer,
    expected_shapes,
    parse_model_facts,
    save_tokenizer,
)

NUM_LAYERS = 2
"""Number of layers with experts, or of dense layers in a dense model; dense layers before experts add one."""

HIDDEN_SIZE = 64

HIDDEN_SIZE_ON_GPUS = 256

HEAD_DIM = 32
"""Smallest head dimension that the attention kernels of vLLM's CPU build support."""

RANK_WIDTH = 32
"""Inner width of a network on one rank; vLLM's CPU kernels for experts need a multiple of it."""

RANK_WIDTH_ON_GPUS = 128
"""Inner width of a network on one rank on GPUs, where kernels for experts have tiles of up to 128."""


def small_facts(
    facts: ModelFacts,
    parallel: ParallelSection,
    generator: GeneratorSection,
    *,
    max_context_length: int,
    on_gpus: bool,
) -> ModelFacts:
    """Return the shape of the tiny model.

    The numbers of heads and experts are the smallest divisors of the model's own numbers that fit the degrees
    of tensor and expert parallelism in the same way. On GPUs the head dimensions are kept, because kernels
    are chosen by them.
    """
    ranks = math.lcm(parallel.tensor, generator.tensor_parallel)
    width = ranks * (RANK_WIDTH_ON_GPUS if on_gpus else RANK_WIDTH)
    num_kv_heads, num_heads = _heads(facts, parallel.tensor, generator.tensor_parallel)
    latent = facts.latent
    head_dim = facts.head_dim if on_gpus else min(facts.head_dim, HEAD_DIM)
    if latent is not None and not on_gpus:
        latent = LatentAttention(
            query_rank=min(latent.query_rank, HIDDEN_SIZE),
            kv_rank=min(latent.kv_rank, HEAD_DIM),
            nope_head_dim=min(latent.nope_head_dim, HEAD_DIM),
            rope_head_dim=min(latent.rope_head_dim, HEAD_DIM),
            value_head_dim=min(latent.value_head_dim, HEAD_DIM),
        )
        head_dim = latent.nope_head_dim + latent.rope_head_dim
    linear = facts.linear
    if linear is not None:
        # A layer of each kind.
        linear = dataclasses.replace(
            linear,
            full_layers=(1,),
            rotary_dim=2 * max(1, head_dim * linear.rotary_dim // facts.head_dim // 2),
            num_key_heads=1,
            num_value_heads=2 if linear.num_value_heads > linear.num_key_heads else 1,
            key_head_dim=linear.key_head_dim if on_gpus else HEAD_DIM,
            value_head_dim=linear.value_head_dim if on_gpus else HEAD_DIM,
        )
    num_dense, num_layers = min(facts.num_dense_layers, 1), NUM_LAYERS
    if not facts.num_moe_layers:
        num_dense = num_layers
    elif num_dense:
        num_layers += num_dense
    num_experts, top_k = (
        _experts(facts, parallel, generator) if facts.num_experts else (facts.num_experts, facts.top_k)
    )
    return dataclasses.replace(
        facts,
        num_layers=min(num_layers, facts.num_layers),
        num_dense_layers=num_dense,
        hidden_size=HIDDEN_SIZE_ON_GPUS if on_gpus else HIDDEN_SIZE,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        top_k=top_k,
        vocab_size=NUM_CHARACTER_TOKENS,
        expert_hidden_size=width if facts.expert_hidden_size else 0,
        dense_hidden_size=width if facts.dense_hidden_size else 0,
        max_position_embeddings=max_context_length,
        latent=latent,
        linear=linear,
        gated_hidden_size=width if facts.gated_hidden_size else 0,
    )


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _heads(facts: ModelFacts, trainer_ranks: int, engine_ranks: int) -> tuple[int, int]:
    """Return the numbers of key-value heads and query heads.

    An engine with more ranks than key-value heads repeats these heads.
    """
    is_split = facts.num_kv_heads % engine_ranks == 0
    # The model's own numbers satisfy all conditions, because the config's check has accepted them.
    num_kv_heads = next(
        (
            count
            for count in _divisors(facts.num_kv_heads)
            if count % trainer_ranks == 0
            and count >= min(2, facts.num_kv_heads)
            and (count % engine_ranks == 0 if is_split else engine_ranks % count == 0)
        ),
        facts.num_kv_heads,
    )
    if facts.num_kv_heads == facts.num_heads:
        return num_kv_heads, num_kv_heads
    num_heads = next(
        (
            count
            for count in _divisors(facts.num_heads)
            if count % num_kv_heads == count % trainer_ranks == count % engine_ranks == 0
            and count >= 2 * num_kv_heads
        ),
        facts.num_heads,
    )
    return num_kv_heads, num_heads


def _experts(facts: ModelFacts, parallel: ParallelSection, generator: GeneratorSection) -> tuple[int, int]:
    """Return the number of experts, and the number chosen for a token: at most a quarter of them."""
    # With fewer experts than ranks that share them, FSDP would shard each expert inside.
    ranks = parallel.data_shard * parallel.context * parallel.tensor
    for count in _divisors(facts.num_experts):
        top_k = min(facts.top_k, max(1, count // 4))
        routing = facts.routing
        if (
            count % parallel.expert == 0
            and (not generator.expert_parallel or count % generator.tensor_parallel == 0)
            and count >= min(ranks, facts.num_experts)
            and count >= min(8, facts.num_experts)
            and (
                routing is None
                or (
                    count % routing.num_groups == 0
                    and (routing.num_groups == 1 or count >= 2 * routing.num_groups)
                    and routing.num_limited_groups * (count // routing.num_groups) >= top_k
                )
            )
        ):
            return count, top_k
    return facts.num_experts, facts.top_k


_OF_OTHER_SIZES = frozenset({"layer_types", "torch_dtype", "quantization_config"})
"""Keys of a config.json that list the layers or describe the weight files, and so are left out."""


def write_model(
    folder: Path,
    raw: Mapping[str, object],
    facts: ModelFacts,
    *,
    chat_template: bool,
    template_arguments: Iterable[str],
    seed: int,
) -> None:
    """Write a Hugging Face folder with a random model of shape ``facts``.

    ``raw`` is the real model's config.json, of which everything except sizes is kept. Weights are float32:
    matrices normal with variance 1 / inputs, biases normal with standard deviation 0.1, norms 1.
    """
    folder.mkdir(parents=True)
    tokenizer = character_tokenizer(chat_template=chat_template, template_arguments=template_arguments)
    assert len(tokenizer) == facts.vocab_size
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    own = dict(FAMILIES[facts.model_type].sizes(facts)) | ends | {"bos_token_id": None, "dtype": "float32"}
    text = raw.get("text_config")
    small = _kept(raw) | ({"text_config": _kept(text) | own} if isinstance(text, dict) else own)
    assert parse_model_facts(small, str(folder)) == facts
    (folder / "config.json").write_text(json.dumps(small, indent=2), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2), encoding="utf-8")
    save_tokenizer(tokenizer, folder)
    rng = np.random.default_rng(seed)
    tensors = {name: _random(name, shape, rng) for name, shape in expected_shapes(facts).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _kept(raw: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in raw.items() if key not in _OF_OTHER_SIZES}


def _random(name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    if name.endswith("bias"):
        return rng.normal(0.0, 0.1, shape).astype(np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.normal(0.0, shape[-1] ** -0.5, shape).astype(np.float32)
