"""TorchTitan's model families by Hugging Face's ``model_type``."""

from forgeasync.trainer.families.deepseek_v3 import DEEPSEEK_V3
from forgeasync.trainer.families.family import TitanFamily
from forgeasync.trainer.families.llama import LLAMA
from forgeasync.trainer.families.qwen3 import QWEN3

TITAN_FAMILIES: dict[str, TitanFamily] = {
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3,
    "llama": LLAMA,
    "deepseek_v3": DEEPSEEK_V3,
}
