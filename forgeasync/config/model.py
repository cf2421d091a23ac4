"""Which model is trained and sampled from, and its adapters."""

from enum import StrEnum

from pydantic import Field

from forgeasync.schema import Section


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


MAX_ROW_TOKENS = 2**22
"""Most tokens in a row: rotary tables for every position are built with the model, 2 GiB at this length."""


class ModelSection(Section):
    """Which model is trained and sampled from."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer.json) or hub id; the trainer, the
    generators and the tokenizer all read this one place."""
    max_context_length: int = Field(gt=0, le=MAX_ROW_TOKENS)
    """Most tokens of prompt and response together."""


MAX_LORA_RANK = 512


class LoraSection(Section):
    """Train low-rank adapters of a frozen base model instead of its weights; only adapters are published."""

    rank: int = Field(gt=0, le=MAX_LORA_RANK)
    """Rank of the adapters; vLLM serves adapters up to 512."""
    alpha: float = Field(ge=1e-6, le=1e6)
    """Scale: the product of an adapter's two matrices is multiplied by alpha / rank."""
    targets: tuple[str, ...] = Field(min_length=1)
    """Linear layers to adapt, by the last part of their names, such as ``q_proj`` or ``down_proj``. In an MoE
    layer every expert gets its own adapter."""
