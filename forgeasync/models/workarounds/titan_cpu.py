"""Makes TorchTitan 0.3.0 usable on a machine without an accelerator. It has no effect on others.

``forgeasync.trainer`` imports this before anything else of TorchTitan: ``torchtitan.tools.utils.device_type``
falls back to "cuda" without an accelerator, and other modules of TorchTitan copy that value on import. This
can go when TorchTitan falls back to "cpu".
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

    TorchTitan turns off gradient division. FSDP2 (torch 2.13) then uses the reduce operation PREMUL_SUM, and
    gloo has only SUM.
    """
    if DEVICE_TYPE == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def unpin_offloaded(model: torch.nn.Module) -> None:
    """Let FSDP2 offload to pageable memory; to be called before the model has any.

    TorchTitan asks for pinned memory, which torch has only with an accelerator.
    """
    if DEVICE_TYPE == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        parameter.pin_memory = False
