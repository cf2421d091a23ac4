"""RMSNorm on CPUs as a single autograd function.

torch 2.13 has a kernel for it on GPUs only. On CPUs it is six operators with ten more in the backward pass,
and autograd keeps the normalized input in addition to the input. Can go when ``torch.rms_norm`` is one
operator on CPUs too.

Shape suffixes: L leading dims (any number), D the dim that is normalized.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.module import Module

from forgeasync.trainer.workarounds.low_precision_sums import as_config


class _Context(FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Normalized(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) * weight`` (https://arxiv.org/abs/1910.07467, equation 4).

    Let s = sqrt(mean(x^2) + eps), n = x / s, and g the gradient of the output. The gradient of the weight is
    the sum of g n over all positions. That of the input is (g weight - n mean(g weight n)) / s.
    """

    @staticmethod
    def forward(ctx: _Context, x_LD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        norm_L1 = torch.linalg.vector_norm(x_LD, dim=-1, keepdim=True)
        scale_L1 = norm_L1.square_().div_(x_LD.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_LD, weight_D, scale_L1)
        return (x_LD * scale_L1).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_LD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_LD, weight_D, scale_L1 = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        n_LD = x_LD * scale_L1
        product_LD = grad_LD * n_LD
        grad_weight_D = product_LD.sum(dim=tuple(range(x_LD.ndim - 1))) if needs_weight else None
        if not needs_x:
            return None, grad_weight_D, None
        mean_L1 = (product_LD @ weight_D).div_(x_LD.shape[-1]).unsqueeze(-1)
        grad_x_LD = torch.mul(grad_LD, weight_D, out=product_LD)
        return grad_x_LD.addcmul_(n_LD, mean_L1, value=-1).mul_(scale_L1), grad_weight_D, None


class CpuRMSNorm(RMSNorm):
    """TorchTitan's RMSNorm, with ``_Normalized`` where it applies.

    It does not apply to DTensors, to compiled layers, which Inductor fuses, and to dtypes other than float32
    and float64, which torch computes in float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., D], normalized over its last dimension, times the weight."""
        weight = self.weight
        if (
            torch.compiler.is_compiling()
            or x.dtype not in (torch.float32, torch.float64)
            or weight is None
            or weight.dtype != x.dtype
            or isinstance(x, DTensor)
            or isinstance(weight, DTensor)
        ):
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _Normalized.apply(x, weight, eps)


def use_cpu_norms(config: Module.Config) -> None:
    """Make a model's config, in all its parts, build ``CpuRMSNorm`` in place of RMSNorm."""
    for field in dataclasses.fields(config):
        part = getattr(config, field.name)
        if type(part) is RMSNorm.Config:
            setattr(config, field.name, as_config(CpuRMSNorm, part))
        for one in part if isinstance(part, list) else [part]:
            if isinstance(one, Module.Config):
                use_cpu_norms(one)
