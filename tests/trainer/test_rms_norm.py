"""RMSNorm on CPUs against torch's own in float64, and where it leaves the work to torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.nn_modules import RMSNorm

from forgeasync.trainer import CpuRMSNorm, titan_config
from tests.support.config_samples import FACTS

EPS = 1e-6


def make_norm(size: int, dtype: torch.dtype = torch.float32) -> CpuRMSNorm:
    norm = CpuRMSNorm.Config(normalized_shape=size, eps=EPS).build().to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(size, generator=torch.Generator().manual_seed(1)))
    return norm


def results(norm: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of input and weight."""
    x = x.detach().clone().requires_grad_()
    output = norm(x)
    return [output.detach(), *torch.autograd.grad(output, [x, norm.weight], grad)]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("shape", [(7, 96), (2, 5, 3, 32), (1, 1, 8)])
def test_output_and_gradients(shape: tuple[int, ...], scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator) * scale for _ in range(2))
    # A position of zeros: only the epsilon is there to divide by.
    x[0] = 0.0
    norm = make_norm(shape[-1])
    x64, weight64 = (one.detach().double().requires_grad_() for one in (x, norm.weight))
    reference = F.rms_norm(x64, (shape[-1],), weight64, EPS)
    wanted = [reference.detach(), *torch.autograd.grad(reference, [x64, weight64], grad.double())]
    for found, right in zip(results(norm, x, grad), wanted, strict=True):
        assert (found.double() - right).abs().max() <= 2e-6 * right.abs().max()


def make_plain(norm: CpuRMSNorm) -> RMSNorm:
    plain = RMSNorm.Config(normalized_shape=norm.weight.shape[0], eps=norm.eps).build().to(norm.weight.dtype)
    plain.weight = norm.weight
    return plain


def test_no_tokens_have_no_gradients() -> None:
    output, grad_x, grad_weight = results(make_norm(16), torch.empty(0, 16), torch.empty(0, 16))
    assert output.shape == grad_x.shape == (0, 16) and not grad_weight.any()


def test_a_frozen_weight_and_a_frozen_input() -> None:
    norm, x = make_norm(16), torch.randn(3, 16)
    (grad_weight,) = torch.autograd.grad(norm(x).sum(), norm.weight)
    norm.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    (grad_x,) = torch.autograd.grad(norm(leaf).sum(), leaf)
    norm.weight.requires_grad_(True)
    torch.testing.assert_close([grad_x, grad_weight], results(norm, x, torch.ones(3, 16))[1:])


def saved_bytes(norm: torch.nn.Module, x: torch.Tensor) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    return sum(saved.values())


def test_it_keeps_its_input_and_no_other_tensor_of_that_size() -> None:
    x = torch.randn(1000, 64, requires_grad=True)
    norm = make_norm(64)
    assert saved_bytes(norm, x) < 1.1 * x.nbytes
    assert saved_bytes(make_plain(norm), x) > 1.9 * x.nbytes, "else it can go"


def test_every_norm_of_a_model_is_one() -> None:
    model = titan_config(FACTS).build()
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    # Two of each layer, two of its heads, and the last.
    assert len(norms) == 4 * FACTS.num_layers + 1
    assert {type(norm) for norm in norms} == {CpuRMSNorm}
    assert {norm.eps for norm in norms} == {FACTS.rms_norm_eps}
    assert not isinstance(norms[0].weight, DTensor)
