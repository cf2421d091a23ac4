"""Lets TorchTitan 0.3.0 build models on Hopper and Blackwell without FlashAttention 3 or 4.

TorchTitan activates FlashAttention 3 on GPUs of compute capability 9.0, and FlashAttention 4 from 10.0. torch
then imports packages that TorchTitan does not depend on. With this module, torch's own FlashAttention 2
computes the attention if the package is missing. ``forgeasync.trainer`` imports this module before it builds
a model. It can go when TorchTitan checks for the package itself.
"""

import importlib.util
import logging
from functools import cache

import torchtitan.tools.utils as titan_utils

from forgeasync.config import FLASH_ATTENTION_PACKAGES, FlashAttention

logger = logging.getLogger(__name__)

_wanted = titan_utils.get_cuda_flash_attention_impl

_choice = FlashAttention.AUTO


def choose(choice: FlashAttention) -> None:
    """Choose the attention of models built later. Building a model raises if the choice is not available."""
    global _choice
    _choice = choice


def flash_attention_impl() -> str | None:
    """Return the implementation to activate: the GPU's best if it is installed; None for FlashAttention 2."""
    if _choice is not FlashAttention.AUTO:
        return None if _choice is FlashAttention.FA2 else _choice.value
    wanted = _wanted()
    return wanted if wanted is None or _is_installed(wanted) else None


@cache
def _is_installed(wanted: str) -> bool:
    package = FLASH_ATTENTION_PACKAGES[int(wanted.removeprefix("FA"))]
    try:
        found = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        # A parent package is missing.
        found = False
    if not found:
        logger.warning("attention is computed by FlashAttention 2: %s needs the package %s", wanted, package)
    return found


titan_utils.get_cuda_flash_attention_impl = flash_attention_impl
