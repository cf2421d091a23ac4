"""What is changed of vLLM before an engine: kernels are found among its modules, nothing is compiled."""

import asyncio
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from forgeasync.config import GeneratorSection, SamplingSection, WeightsSection
from forgeasync.testing import write_tiny_model
from tests.support.engines import start_engine
from tests.support.processes import run_alone

NUM_RESPONSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What there is to see once an engine has sampled."""

    num_looked_at: int
    """How often vLLM has looked into an object of a module that is not its own."""
    num_replaced: int
    """Kernels that the CPU build has replaced."""
    places_of_originals: list[str]
    """Where one of those is still found."""
    num_compiled: int
    """Frames that dynamo has compiled."""
    num_responses: int


class Watched:
    """Counts who looks into its instances."""

    num_looked_at = 0

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        Watched.num_looked_at += 1
        return {}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run_alone(_sampled, write_tiny_model(tmp_path_factory.mktemp("model") / "model"))


def _sampled(folder: Path) -> Seen:
    from vllm.triton_utils import dispatcher
    from vllm.v1.sample import rejection_sampler

    others, copies = ModuleType("others"), ModuleType("vllm.copies")
    others.value = Watched()  # type: ignore[attr-defined]
    # As a module of vLLM has it that imports a kernel by its name.
    copies.kernel = rejection_sampler.expand_kernel  # type: ignore[attr-defined]
    sys.modules |= {"others": others, "vllm.copies": copies}
    num_responses = asyncio.run(_sample(folder))
    originals = [original for original, _ in dispatcher._registry.values()]
    places = [
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if module is not others
        for attribute, value in list(vars(module).items() if isinstance(module, ModuleType) else ())
        if any(value is original for original in originals)
    ]
    return Seen(
        num_looked_at=Watched.num_looked_at,
        num_replaced=len(originals),
        places_of_originals=places,
        num_compiled=sum(torch._dynamo.utils.counters["frames"].values()),
        num_responses=num_responses,
    )


async def _sample(folder: Path) -> int:
    section = GeneratorSection(max_num_seqs=8, max_num_batched_tokens=64, kv_cache_gib=0.02)
    engine = await start_engine(folder, section, WeightsSection())
    group = await engine.generate(
        prompt_ids_P=np.arange(1, 6, dtype=np.int32),
        num_samples=NUM_RESPONSES,
        sampling=SamplingSection(max_response_tokens=8, top_k=5),
        seed=0,
    )
    engine.shutdown()
    return len(group)


def test_kernels_are_found_among_vllm_s_own_modules_alone(seen: Seen) -> None:
    assert seen.num_looked_at == 0


def test_every_kernel_is_replaced_wherever_it_is(seen: Seen) -> None:
    assert seen.num_replaced > 5 and seen.places_of_originals == []


def test_sampling_compiles_nothing(seen: Seen) -> None:
    assert seen.num_responses == NUM_RESPONSES and seen.num_compiled == 0


def test_workers_are_spawned_whatever_the_environment_asks_for(tmp_path: Path) -> None:
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

    import forgeasync.actors.generator  # noqa: F401

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
        engine = await start_engine(folder, generator, WeightsSection())
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
