"""New weights in engines of the form that they have on GPUs: the route chosen, and where it ends."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.config import GeneratorSection, SamplingSection, ShadowMemory, WeightsSection
from forgeasync.rollouts import Rollout
from forgeasync.testing import write_tiny_model
from tests.support.engine_weights import assert_engine_holds
from tests.support.engines import assert_logprobs, assert_routing, expected, start_engine
from tests.support.gpu_runner import run_on_gpu_runner
from tests.support.weight_service import FolderPublisher

SAMPLING = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """Engines of one host, by engine, after three versions."""

    routes: list[str]
    parameters: list[list[dict[str, torch.Tensor]]]
    has_moved: bool
    """Whether a parameter changed its address."""
    running: list[Rollout]
    """Sampled while versions came."""
    after: list[Rollout]


async def update(
    folder: Path, other: Path, out: Path, shadow: ShadowMemory, num_engines: int, reload: bool
) -> Updated:
    """Take versions 1 to 3 into engines that share their host's memory; the last one is ``other``."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    from forgeasync.generator import gpu_worker
    from forgeasync.weights import HostShare

    # Linear layers of GPUs keep their weights; the CPU build's hand them to oneDNN.
    ops._supports_onednn = False
    # Experts that keep the checkpoint's order, as vLLM chooses on Hopper.
    choice = (UnquantizedMoeBackend.TRITON, TritonExperts)
    method.select_unquantized_moe_backend = lambda moe_config: choice
    if reload:
        gpu_worker.reload_reasons = lambda *_: ("a test asks for it",)
    publisher = FolderPublisher(folder, out)
    engines, receivers = [], []
    for index in range(num_engines):
        generator = GeneratorSection(max_num_seqs=4, max_num_batched_tokens=32, kv_cache_gib=0.002)
        engine = await start_engine(folder, generator, WeightsSection(shadow=shadow))
        engines.append(engine)
        share = HostShare(index=index, count=num_engines)
        receivers.append(await publisher.connect(engine, out / "receive-buffer", shadow=shadow, share=share))
    prompt = np.arange(3, 12, dtype=np.int32)

    async def sample(number: int) -> list[Rollout]:
        # One engine at a time: vLLM's kernels for experts have one workspace in a process.
        group = await engines[number].generate(prompt_ids_P=prompt, num_samples=1, sampling=SAMPLING, seed=1)
        return list(group)

    addresses = [await _ask(engine, _addresses) for engine in engines]
    running = asyncio.create_task(sample(0))
    for version in (1, 2, 3):
        tensors = publisher.tensors if version == 2 else load_file(other / "model.safetensors")
        manifest = publisher.stage(version % 2, version, tensors)
        reports = await asyncio.gather(*(receiver.begin(manifest) for receiver in receivers))
        assert all(report.is_complete for report in reports), reports
        await asyncio.gather(*(receiver.stage() for receiver in receivers))
        await asyncio.gather(*(receiver.finish() for receiver in receivers))
    updated = Updated(
        routes=[str(receiver.route) for receiver in receivers],
        parameters=[await _ask(engine, _parameters) for engine in engines],
        has_moved=addresses != [await _ask(engine, _addresses) for engine in engines],
        running=await running,
        after=[rollout for number in range(num_engines) for rollout in await sample(number)],
    )
    for engine in engines:
        engine.shutdown()
    return updated


async def _ask(engine: object, question: object) -> list[object]:
    return await engine.between_steps(lambda core: core.collective_rpc(question))


def _parameters(worker: object) -> dict[str, torch.Tensor]:
    return {name: p.data.clone() for name, p in worker.model_runner.get_model().named_parameters()}


def _addresses(worker: object) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in worker.model_runner.get_model().named_parameters()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model that engines load, and another one's weights."""
    root = tmp_path_factory.mktemp("models")
    return (
        write_tiny_model(root / "before", seed=0, scale=12.0, num_experts=8, top_k=3),
        write_tiny_model(root / "after", seed=1, scale=12.0, num_experts=8, top_k=3),
    )


@pytest.mark.engine
@pytest.mark.parametrize(
    ("shadow", "num_engines", "reload"),
    [
        pytest.param(ShadowMemory.HOST, 2, False, id="host-shared_by_2"),
        pytest.param(ShadowMemory.DEVICE, 1, False, id="device", marks=pytest.mark.exhaustive),
        pytest.param(ShadowMemory.HOST, 1, True, id="reloaded", marks=pytest.mark.exhaustive),
    ],
)
def test_engines_sample_under_what_was_published(
    folders: tuple[Path, Path], tmp_path: Path, shadow: ShadowMemory, num_engines: int, reload: bool
) -> None:
    folder, other = folders
    updated = run_on_gpu_runner(update, folder, other, tmp_path, shadow, num_engines, reload)
    for route in updated.routes:
        assert route.startswith("weights are loaded by" if reload else "weights are copied into"), route
    assert len(updated.parameters) == num_engines
    for workers in updated.parameters:
        # Bit for bit what the CPU build's engines hold after the same versions (tests/generator).
        assert_engine_holds(workers, load_file(other / "model.safetensors"))
    assert not updated.has_moved, "captured CUDA graphs read the parameters where they were"
    models = {
        version: AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
        for version, one in enumerate((folder, other, folder, other))
    }
    for rollout in updated.after:
        assert [span.version for span in rollout.version_spans] == [3]
        exact = expected(models, rollout, recomputed=True)
        assert_logprobs(rollout, exact, SAMPLING)
        assert_routing(rollout, exact)
    assert any(len(rollout.version_spans) > 1 for rollout in updated.running), "no sequence ran meanwhile"


@pytest.mark.engine
@pytest.mark.exhaustive
def test_weights_in_an_order_of_their_kernel_are_not_copied_to(folders: tuple[Path, Path]) -> None:
    """FlashInfer's experts on Blackwell have one; here the CPU build's packed experts."""
    route = run_on_gpu_runner(route_of, folders[0])
    assert "while decoding stands still" in route
    assert "w13_weight is kept in an order of its kernel (row " in route


async def route_of(folder: Path) -> str:
    """The route of an engine that has loaded ``folder``, with the CPU build's experts."""
    import vllm._custom_ops as ops

    from forgeasync.generator import EngineWeights

    ops._supports_onednn = False
    generator = GeneratorSection(max_num_seqs=4, max_num_batched_tokens=32, kv_cache_gib=0.002)
    engine = await start_engine(folder, generator)
    shapes = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    route = await EngineWeights(engine.between_steps).trace(shapes, torch.float32)
    engine.shutdown()
    return str(route)
