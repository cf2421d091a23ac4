"""What is changed of vLLM before an engine, and what must not happen before one."""

import asyncio
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.testing import write_tiny_model
from tests.support.engines import start_engine
from tests.support.processes import run_alone

NUM_RESPONSES = 3


def _sampled(folder: Path) -> tuple[int, int]:
    """The number of responses that an engine has sampled, and of frames that dynamo has compiled for them."""
    num_responses = asyncio.run(_sample(folder))
    return num_responses, sum(torch._dynamo.utils.counters["frames"].values())


async def _sample(folder: Path) -> int:
    section = GeneratorSection(max_num_seqs=8, max_num_batched_tokens=64, kv_cache_gib=0.02)
    engine = await start_engine(folder, section)
    group = await engine.generate(
        prompt_ids_P=np.arange(1, 6, dtype=np.int32),
        num_samples=NUM_RESPONSES,
        sampling=SamplingSection(max_response_tokens=8, top_k=5),
        seed=0,
    )
    engine.shutdown()
    return len(group)


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


def _askers(folder: Path) -> list[str]:
    """Who asks CUDA for devices between the import of a generator's actor and the start of its engine."""
    from vllm.v1.engine.core import EngineCore

    import forgeasync.runtime.generator  # noqa: F401

    askers: list[str] = []
    start = EngineCore.__init__

    def note(name: str) -> Callable[..., object]:
        real = getattr(torch.cuda, name)

        def asked(*arguments: object, **named: object) -> object:
            if not has_started:
                askers.append(f"torch.cuda.{name}: {''.join(traceback.format_stack(limit=4)[:-1])}")
            return real(*arguments, **named)

        return asked

    def starts(*arguments: object, **named: object) -> None:
        has_started.append(True)
        start(*arguments, **named)

    has_started: list[bool] = []
    for name in ("_lazy_init", "device_count", "current_device", "get_device_properties", "init"):
        setattr(torch.cuda, name, note(name))
    EngineCore.__init__ = starts

    async def go() -> None:
        generator = GeneratorSection(max_num_seqs=4, kv_cache_gib=0.02)
        engine = await start_engine(folder, generator)
        engine.shutdown()

    asyncio.run(go())
    assert has_started
    return askers


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
