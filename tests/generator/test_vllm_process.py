"""What is changed of vLLM before an engine, and what must not happen before one."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.testing import write_tiny_model
from tests.support.engines import start_engine
from tests.support.processes import run_alone, run_apart

NUM_RESPONSES = 3


async def _sampled(folder: Path) -> tuple[int, int]:
    """The number of responses that an engine has sampled, and of frames that dynamo has compiled for them."""
    section = GeneratorSection(max_num_seqs=8, max_num_batched_tokens=64, kv_cache_gib=0.02)
    engine = await start_engine(folder, section)
    group = await engine.generate(
        prompt_ids_P=np.arange(1, 6, dtype=np.int32),
        num_samples=NUM_RESPONSES,
        sampling=SamplingSection(max_response_tokens=8, top_k=5),
        seed=0,
    )
    engine.shutdown()
    return len(group), sum(torch._dynamo.utils.counters["frames"].values())


def test_sampling_compiles_nothing(tmp_path: Path) -> None:
    assert run_alone(_sampled, write_tiny_model(tmp_path / "model")) == (NUM_RESPONSES, 0)


def test_workers_are_spawned_whatever_the_environment_asks_for() -> None:
    """A fork of a process with CUDA or with threads may hang, and vLLM forks by default."""
    script = (
        "import forgeasync.generator\n"
        "from vllm.utils.system_utils import get_mp_context\n"
        "print(get_mp_context().get_start_method())\n"
    )
    environment = os.environ | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "spawn\n", done.stderr


def test_cuda_is_not_asked_for_devices_before_the_engine_starts(tmp_path: Path) -> None:
    assert run_alone(_askers, write_tiny_model(tmp_path / "model")) == []


async def _askers(folder: Path) -> list[str]:
    """What CUDA is asked between the import of a generator's actor and the start of its engine."""
    from vllm.v1.engine.core import EngineCore

    import forgeasync.runtime.generator  # noqa: F401

    names = ("_lazy_init", "device_count", "current_device", "get_device_properties", "init")
    asked = {
        name: mock.patch.object(torch.cuda, name, side_effect=getattr(torch.cuda, name)).start()
        for name in names
    }
    start = EngineCore.__init__
    asked_before: list[list[str]] = []

    def starts(*arguments: object, **named: object) -> None:
        asked_before.append([name for name, one in asked.items() if one.called])
        start(*arguments, **named)

    EngineCore.__init__ = starts
    engine = await start_engine(folder, GeneratorSection(max_num_seqs=4, kv_cache_gib=0.02))
    engine.shutdown()
    return asked_before[0]


def test_as_likely_tokens_are_counted_by_row() -> None:
    assert run_alone(_counts) == [1, 3, 4, 2]


def _counts() -> list[int]:
    from forgeasync.generator import count_at_least

    # The most likely token, one with its equal, one that top-k has cut, and one at the edge of what it left.
    cut = -torch.inf
    logprobs_BV = torch.tensor(
        [[-0.1, -2.0, -3.0, cut], [-1.0, -1.5, -1.5, -9.0], [-0.5, -0.9, cut, cut], [-0.5, -0.9, cut, cut]]
    )
    bounds_B1 = torch.tensor([[-0.1], [-1.5], [cut], [-0.9]])
    return count_at_least(logprobs_BV, bounds_B1).tolist()


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
