"""Which model is trained and sampled from, and its adapters."""

from enum import StrEnum

from pydantic import Field

from forgeasync.schema.section import Section


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


MAX_ROW_TOKENS = 2**22
"""Rotary tables for every position of a row are built with the model: 2 GiB at this length."""


class ModelSection(Section):
    """Which model is trained and sampled from."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer.json) or hub id; the trainer, the
    generators and the tokenizer all read this one place."""
    max_context_length: int = Field(gt=0, le=MAX_ROW_TOKENS)
    """Longest prompt plus response, in tokens."""


MAX_LORA_RANK = 512


class LoraSection(Section):
    """Train low-rank adapters of a frozen base model instead of its weights; only they travel."""

    rank: int = Field(gt=0, le=MAX_LORA_RANK)
    """vLLM serves adapters up to this rank."""
    alpha: float = Field(ge=1e-6, le=1e6)
    """An adapter's product is scaled by alpha / rank."""
    targets: tuple[str, ...] = Field(min_length=1)
    """Last part of the names of the linear layers to adapt, such as ``q_proj`` or ``down_proj``; of an MoE
    projection every expert gets an adapter of its own."""
