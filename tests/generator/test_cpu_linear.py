"""Linear layers of the CPU build keep their weights, whatever the CPU offers."""

import pytest
import torch

from tests.support.processes import run_apart


@pytest.mark.engine
def test_no_weight_is_packed_and_dropped_on_cpus_with_amx() -> None:
    assert run_apart(_kept_numbers) == 64 * 32


def _kept_numbers() -> int:
    from vllm.model_executor.layers import utils as layers

    from forgeasync.generator import keep_linear_weights

    # As on a CPU with AMX; nothing that needs it is called.
    torch.cpu._is_amx_tile_supported = lambda: True
    assert layers.check_cpu_sgl_kernel(64, 32, torch.bfloat16), "vLLM would pack it"
    keep_linear_weights()
    linear = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layers.dispatch_cpu_unquantized_gemm(linear, remove_weight=True)
    x_TD = torch.randn(3, 32, dtype=torch.bfloat16)
    expected_TD = torch.nn.functional.linear(x_TD, linear.weight)
    assert torch.equal(linear.cpu_linear(x_TD, linear.weight, None), expected_TD)
    return linear.weight.numel()
