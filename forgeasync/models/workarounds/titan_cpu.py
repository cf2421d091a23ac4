"""Makes TorchTitan 0.3.0 usable on machines without an accelerator. It has no effect on other machines.

Without an accelerator, ``torchtitan.tools.utils.device_type`` falls back to "cuda", and other modules of
TorchTitan copy that value on import. ``forgeasync.trainer`` therefore imports this module before any other
module of TorchTitan. It can go when TorchTitan falls back to "cpu".
"""

import torch
import torchtitan.tools.utils as titan_utils
from torch.distributed.fsdp import FSDPModule

if not torch.accelerator.is_available():
    titan_utils.device_type = "cpu"
    titan_utils.device_module = torch.cpu


DEVICE_TYPE: str = titan_utils.device_type


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
