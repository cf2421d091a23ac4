"""Registers all model families. A new one is a folder beside this file and a name here."""

from forgeasync.models.deepseek_v3.facts import DEEPSEEK_V3
from forgeasync.models.family import Family
from forgeasync.models.llama.facts import LLAMA
from forgeasync.models.qwen3.facts import QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {family.model_type: family for family in (QWEN3, QWEN3_MOE, LLAMA, DEEPSEEK_V3)}
"""Families by ``model_type``."""
