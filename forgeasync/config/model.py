"""Sections for the model and its adapters, and the model's shape as described by its config.json."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from forgeasync.schema import Refusal, Section


class Dtype(StrEnum):
    """Floating-point format of parameters and computations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


MAX_ROW_TOKENS = 2**22
"""Maximum number of tokens in a row: the model has rotary tables for all positions, 2 GiB at this length."""


class ModelSection(Section):
    """Model that is trained and sampled from."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer.json) or hub id; the trainer, the generators
    and the tokenizer all read from it."""
    max_context_length: int = Field(gt=0, le=MAX_ROW_TOKENS)
    """Maximum number of tokens of prompt and response together."""


EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")
"""Linear layers of experts that can have adapters."""

ADAPTABLE = ("q_proj", "k_proj", "v_proj", "o_proj", *EXPERT_TARGETS)
"""Linear layers that can have adapters, by the last part of their names."""

MAX_LORA_RANK = 512
"""Maximum rank of an adapter, which vLLM allows."""


class LoraSection(Section):
    """Train low-rank adapters of a frozen base model instead of its weights; only adapters are published."""

    rank: int = Field(gt=0, le=MAX_LORA_RANK)
    """Rank of the adapters; vLLM serves adapters up to 512."""
    alpha: float = Field(ge=1e-6, le=1e6)
    """Scale of the adapters: the product of an adapter's two matrices is multiplied by alpha / rank."""
    targets: tuple[str, ...] = Field(min_length=1)
    """Linear layers to adapt, by the last part of their names, such as ``q_proj`` or ``down_proj``. In an MoE
    layer every expert gets its own adapter."""

    def find_problems(self) -> Iterator[Refusal]:
        """Yield targets that cannot have adapters or are listed twice."""
        for target in [one for one in self.targets if one not in ADAPTABLE][:1]:
            remedy = f"is not a layer that can have an adapter; must be among {', '.join(ADAPTABLE)}"
            yield "targets", remedy, target
        for target in [one for one in self.targets if self.targets.count(one) > 1][:1]:
            yield "targets", "is listed twice; must be listed once", target


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Scaling of rotary frequencies in Llama 3.1: long wavelengths are stretched by ``factor``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope:
    """Scaling of rotary frequencies by YaRN (Peng et al., 2023), as in DeepSeek-V3 and gpt-oss.

    ``mscale`` increases the softmax scale; cosines and sines are not scaled.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    original_max_position_embeddings: int
    truncates: bool = True
    """Whether the bounds of scaled dimensions are rounded to whole ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1)."""

    query_rank: int
    """Rank of the compressed queries; 0: queries are projected directly."""
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedRouting:
    """Expert routing of DeepSeek-V3 (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2).

    Scores are sigmoids; a bias per expert is added to them for the choice of experts only. Experts are chosen
    from the best ``num_limited_groups`` of ``num_groups`` groups.
    """

    num_groups: int
    num_limited_groups: int
    normalizes: bool
    scale: float
    num_shared_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers of Qwen3.5 with the gated delta rule (``forgeasync.models.cpu_kernels``), not attention."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    width: int
    """Tokens that the convolution of a token covers."""
    full_layers: tuple[int, ...]
    """Indices of the layers with full attention, whose output is gated."""
    rotary_dim: int
    """Rotated dimensions of each head of full attention."""

    @property
    def num_channels(self) -> int:
        """Number of queries', keys' and values' dimensions together, over all heads."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Shape of a model; without experts, ``num_experts``, ``top_k`` and ``expert_hidden_size`` are 0."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Head dimension of queries and keys."""
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_theta: float
    rms_norm_eps: float
    num_experts: int = 0
    top_k: int = 0
    expert_hidden_size: int = 0
    num_dense_layers: int = 0
    """Number of leading layers that have one feed-forward network instead of experts."""
    dense_hidden_size: int = 0
    """Hidden size of the feed-forward networks of dense layers."""
    rope_scaling: Llama3Rope | YarnRope | None = None
    latent: LatentAttention | None = None
    routing: BiasedRouting | None = None
    """Routing of DeepSeek-V3; None: softmax scores, normalized over the chosen experts."""
    num_mtp_layers: int = 0
    """Number of layers of multi-token prediction after the others, which are not trained."""
    partial_rotary_factor: float = 1.0
    """Part of each head that is rotated."""
    has_attention_biases: bool = False
    """Whether projections to queries, keys and values have biases."""
    has_head_norms: bool = False
    """Whether queries and keys have norms, in families where that is an option."""
    window: int = 0
    """Number of tokens that a token sees in every second layer, from the first one on; 0: all of its past."""
    linear: LinearAttention | None = None
    gated_hidden_size: int = 0
    """Hidden size of a shared expert whose output is gated; 0 without one."""
    checkpoint_prefix: str = "model."
    """Beginning of the names of tensors in files, except for the output layer's."""

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with experts, which follow the dense layers."""
        return self.num_layers - self.num_dense_layers

    @property
    def num_windowed_layers(self) -> int:
        """Number of layers with a cache of the keys and values in a window."""
        return -(-self.num_layers // 2) if self.window else 0

    @property
    def num_full_layers(self) -> int:
        """Number of layers with a cache of all keys and values."""
        if self.linear is not None:
            return len(self.linear.full_layers)
        return self.num_layers - self.num_windowed_layers

    @property
    def shared_hidden_size(self) -> int:
        """Hidden size of the network that all shared experts form together; 0 without shared experts."""
        if self.routing is None:
            return self.gated_hidden_size
        return self.routing.num_shared_experts * self.expert_hidden_size

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rope_head_dim
        if self.linear is not None:
            return self.linear.rotary_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def value_head_dim(self) -> int:
        """Dimension of a head's values, which differs from ``head_dim`` with latent attention."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim
