"""Model families: how a config.json is read, and which tensors a checkpoint then has."""

from forgeasync.config.families.deepseek_v3 import DEEPSEEK_V3
from forgeasync.config.families.family import Family
from forgeasync.config.families.llama import LLAMA
from forgeasync.config.families.qwen3 import QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {family.model_type: family for family in (QWEN3, QWEN3_MOE, LLAMA, DEEPSEEK_V3)}
"""By ``model_type``."""
