"""What an engine takes of published weights: its parallel layout, its compiled form, and what it refuses."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.rollouts import Rollout
from forgeasync.testing import write_tiny_model
from forgeasync.weights import Box, FetchReport, Piece, RankLayout, WeightLayout
from tests.support.engines import NO_RECORDS, ROUTING, assert_engine_holds, start_engine
from tests.support.processes import run_alone
from tests.support.weight_service import FolderPublisher

SAMPLING = SamplingSection(temperature=0.9, max_response_tokens=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    report: FetchReport
    parameters: list[dict[str, torch.Tensor]]
    rollouts: tuple[Rollout, ...]


def _generator(*, tensor_parallel: int = 1, compile: bool = False) -> GeneratorSection:
    return GeneratorSection(
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_gib=0.02,
        tensor_parallel=tensor_parallel,
        compile=compile,
    )


async def _update(folder: Path, other: Path, out: Path, generator: GeneratorSection) -> Updated:
    # vLLM pins the workers of a split engine to cores of their own, which few machines here have.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    engine = await start_engine(folder, generator, records=ROUTING)
    try:
        publisher = FolderPublisher(folder, out)
        receiver = await publisher.connect(engine, out / "receive-buffer")
        prompt = np.arange(3, 12, dtype=np.int32)
        await engine.generate(prompt_ids_P=prompt, num_samples=2, sampling=SAMPLING)
        for version in (1, 2, 3):
            tensors = publisher.tensors if version == 2 else load_file(other / "model.safetensors")
            report = await receiver.begin(publisher.stage(version % 2, version, tensors))
            await receiver.stage()
            await receiver.finish()
        rollouts = await engine.generate(prompt_ids_P=prompt, num_samples=4, sampling=SAMPLING)
        return Updated(report=report, parameters=await engine.parameters(), rollouts=rollouts)
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    "generator",
    [
        pytest.param(_generator(), id="eager"),
        pytest.param(_generator(compile=True), id="compiled", marks=pytest.mark.exhaustive),
        pytest.param(_generator(tensor_parallel=2), id="tensor_parallel_2", marks=pytest.mark.exhaustive),
    ],
)
def test_an_engine_computes_with_what_was_published(generator: GeneratorSection, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "before", seed=0, scale=3.0)
    other = write_tiny_model(tmp_path / "after", seed=1, scale=3.0)
    updated = run_alone(_update, folder, other, tmp_path, generator)
    assert updated.report.is_complete
    assert updated.report.num_bytes_needed == sum(
        t.nbytes for t in load_file(other / "model.safetensors").values()
    )
    assert len(updated.parameters) == generator.tensor_parallel
    assert_engine_holds(updated.parameters, load_file(other / "model.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    for rollout in updated.rollouts:
        assert [span.version for span in rollout.version_spans] == [3]
        ids = np.concatenate([rollout.prompt_ids_P, rollout.response_ids_T])
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None].long()).logits[0].double() / SAMPLING.temperature
        rows = torch.log_softmax(logits, -1)[len(rollout.prompt_ids_P) - 1 : -1]
        expected = rows.gather(1, torch.from_numpy(rollout.response_ids_T)[:, None].long())[:, 0]
        np.testing.assert_allclose(rollout.logprobs_T, expected.numpy(), atol=1e-4)


def _layout(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> WeightLayout:
    pieces, end = [], 0
    for name, shape in shapes.items():
        box = Box(start=(0,) * len(shape), size=shape)
        pieces.append(Piece(names=(name,), shape=shape, box=box, offset=end))
        end += -(-box.num_elements * dtype.itemsize // 64) * 64
    rank = RankLayout(rank=0, host_id="h", pieces=tuple(pieces), num_bytes=end)
    return WeightLayout(dtype=dtype, ranks=(rank,))


Shapes = dict[str, tuple[int, ...]]
Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


BAD: dict[str, tuple[Callable[[Shapes], Shapes], torch.dtype, tuple[str, ...]]] = {
    "unknown": (
        lambda shapes: {name.replace("q_proj", "query"): shape for name, shape in shapes.items()},
        torch.float32,
        ("model.layers.0.self_attn.query.weight", "qkv_proj.weight (8192 of 16384 elements)"),
    ),
    "missing": (
        lambda shapes: {name: shape for name, shape in shapes.items() if name != EXPERT},
        torch.float32,
        ("w13_weight (4096 of 32768 elements)",),
    ),
    "shape": (
        lambda shapes: shapes | {Q: (shapes[Q][0], shapes[Q][1] + 32)},
        torch.float32,
        ("cannot take", f"{Q} (128, 96)"),
    ),
    "dtype": (
        lambda shapes: shapes,
        torch.bfloat16,
        ("published as torch.bfloat16", "lm_head.weight (torch.float32)"),
    ),
}


async def _refusals(folder: Path) -> dict[str, str]:
    from forgeasync.generator import EngineWeights

    engine = await start_engine(folder, _generator(), records=NO_RECORDS)
    shapes = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    messages = {}
    before = await engine.parameters()
    for name, (change, dtype, _) in BAD.items():
        layout = _layout(change(shapes), dtype)
        try:
            await EngineWeights(engine.between_steps).trace(layout.shapes, layout.dtype)
        except ValueError as error:
            messages[name] = str(error)
    after = await engine.parameters()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0]), "a trace changed weights"
    engine.shutdown()
    return messages


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "hf")
    return run_alone(_refusals, folder)


@pytest.mark.parametrize("name", BAD)
def test_what_the_engine_cannot_take_is_refused_by_name(messages: dict[str, str], name: str) -> None:
    for text in BAD[name][2]:
        assert text in messages[name]
