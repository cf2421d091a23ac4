"""Changes TorchTitan 0.3.0's ``torchtitan.tools.utils``, where machines lack what it takes for granted.

``forgeasync.trainer`` imports this module before any other module of TorchTitan, because those copy its
values on import.

**Machines without an accelerator.** ``device_type`` falls back to "cuda" there. This part has no effect on
other machines. It can go when TorchTitan falls back to "cpu".

**Hopper and Blackwell without FlashAttention 3 or 4.** TorchTitan activates FlashAttention 3 on GPUs of
compute capability 9.0, and FlashAttention 4 from 10.0. torch then imports packages that TorchTitan does not
depend on. Here, torch's own FlashAttention 2 computes the attention if the package is missing. This part can
go when TorchTitan checks for the package itself.
"""

import importlib.util
import logging
from functools import cache

import torch
import torchtitan.tools.utils as titan_utils
from torch.distributed.fsdp import FSDPModule

from forgeasync.config import FLASH_ATTENTION_PACKAGES, FlashAttention

if not torch.accelerator.is_available():
    titan_utils.device_type = "cpu"
    titan_utils.device_module = torch.cpu


DEVICE_TYPE: str = titan_utils.device_type
"""Type of this machine's devices: ``cuda`` or ``cpu``."""


def allow_gloo_reduction(model: torch.nn.Module) -> None:
    """Let FSDP2 reduce gradients over gloo.

    TorchTitan turns off gradient division. FSDP2 (torch 2.13) then uses the reduce operation PREMUL_SUM, but
    gloo only has SUM.
    """
    if DEVICE_TYPE == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def unpin_offloaded(model: torch.nn.Module) -> None:
    """Let FSDP2 offload to pageable memory. Call this before parameters are materialized.

    TorchTitan requests pinned memory, which torch only has with an accelerator.
    """
    if DEVICE_TYPE == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        parameter.pin_memory = False


logger = logging.getLogger(__name__)

_wanted = titan_utils.get_cuda_flash_attention_impl

_choice = FlashAttention.AUTO


def choose_flash_attention(choice: FlashAttention) -> None:
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
