"""Published weights on their way into an engine: what it takes, refuses, and copies; merged adapters."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forgeasync.config import GeneratorSection, LoraSection, SamplingSection
from forgeasync.generator import (
    AdapterMerger,
    LoadTrace,
    Region,
    check_traces,
    derived_tensors,
    merged_layout,
    other_orders,
)
from forgeasync.models import CheckpointTensors
from forgeasync.testing import write_tiny_model
from forgeasync.weights import Box, ReceiveBuffer, WeightLayout, received_images, whole_tensors
from tests.generator.conftest import Seen
from tests.support.engines import (
    NO_RECORDS,
    assert_engine_holds,
    assert_logprobs,
    assert_routing,
    expected,
    start_engine,
)
from tests.support.peft_adapters import random_adapter, write_merged
from tests.support.processes import run_alone
from tests.support.weight_service import FolderPublisher

SAMPLING = SamplingSection(temperature=0.9, max_response_tokens=24)


def _generator(**fields: object) -> GeneratorSection:
    return GeneratorSection(max_num_seqs=8, max_num_batched_tokens=256, kv_cache_gib=0.02, **fields)


async def _update(folder: Path, other: Path, out: Path, generator: GeneratorSection) -> Seen:
    # vLLM pins the workers of a split engine to cores of their own, which few machines here have.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    engine = await start_engine(folder, generator)
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
        return Seen(report=report, parameters=await engine.parameters(), rollouts=rollouts)
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
    published = load_file(other / "model.safetensors")
    assert updated.report.is_complete
    assert updated.report.num_bytes_needed == sum(tensor.nbytes for tensor in published.values())
    assert len(updated.parameters) == generator.tensor_parallel
    assert_engine_holds(updated.parameters, published)
    models = {3: AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)}
    for rollout in updated.rollouts:
        exact = expected(models, rollout, recomputed=True)
        assert_logprobs(rollout, exact, SAMPLING)
        assert_routing(rollout, exact)


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
        try:
            await EngineWeights(engine.between_steps).trace(change(shapes), dtype)
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


NUM_EXPERTS, INNER, HIDDEN = 20, 4, 6
"""More experts than are compared."""


def regions() -> list[Region]:
    """Where vLLM's loader puts gate and up of every expert: one parameter, [experts, 2 x inner, hidden]."""
    box = Box(start=(0, 0), size=(INNER, HIDDEN))
    return [
        Region(
            name=f"experts.{expert}.{name}",
            box=box,
            parameter="w13",
            target_offset=(2 * expert + half) * INNER * HIDDEN,
            target_strides=(HIDDEN, 1),
        )
        for expert in range(NUM_EXPERTS)
        for half, name in enumerate(("gate", "up"))
    ]


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointTensors:
    tensors = {region.name: 100 * torch.randn(INNER, HIDDEN) for region in regions()}
    save_file(tensors, tmp_path / "model.safetensors")
    return CheckpointTensors(tmp_path)


def loaded(checkpoint: CheckpointTensors, dtype: torch.dtype) -> torch.Tensor:
    halves = [[checkpoint[f"experts.{e}.{name}"] for name in ("gate", "up")] for e in range(NUM_EXPERTS)]
    return torch.stack([torch.cat(pair) for pair in halves]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checkpoints_order_is_copied_to(checkpoint: CheckpointTensors, dtype: torch.dtype) -> None:
    assert other_orders({"w13": loaded(checkpoint, dtype)}, regions(), checkpoint) == []


@pytest.mark.parametrize("order", ["halves_swapped", "experts_turned", "blocks", "last_expert_moved"])
def test_an_order_of_the_kernels_own_is_seen(checkpoint: CheckpointTensors, order: str) -> None:
    w13 = loaded(checkpoint, torch.bfloat16)
    kept = {
        # FlashInfer's CUTLASS kernel.
        "halves_swapped": torch.cat([w13[:, INNER:], w13[:, :INNER]], dim=1),
        "experts_turned": w13.transpose(1, 2).contiguous().view_as(w13),
        "blocks": w13.view(NUM_EXPERTS, 2 * INNER, 2, HIDDEN // 2).transpose(1, 2).contiguous().view_as(w13),
        "last_expert_moved": torch.cat([w13[:-2], w13[-1:], w13[-2:-1]]),
    }[order]
    (reason,) = other_orders({"w13": kept}, regions(), checkpoint)
    assert reason.startswith("w13 is kept in an order of its kernel (row ")


def test_modules_of_unknown_methods_are_not_copied_to() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Other(QuantizeMethodBase):
        def create_weights(self, *arguments: object, **keywords: object) -> None: ...
        def apply(self, *arguments: object, **keywords: object) -> torch.Tensor: ...

    model = torch.nn.ModuleDict({"known": torch.nn.Linear(1, 1), "other": torch.nn.Linear(1, 1)})
    model["known"].quant_method = UnquantizedLinearMethod()
    model["other"].quant_method = Other()
    assert derived_tensors(model) == ["other has Other"]


class ExpertsWithBiases(torch.nn.Module):
    """Loads as vLLM's gpt-oss does on the second of two tensor-parallel ranks."""

    def __init__(self, *, scales: bool) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.zeros(2, 3, 4))
        self.bias = torch.nn.Parameter(torch.zeros(2, 4))
        self._scales = scales

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "bias":
                self.bias.data.copy_(weight.zero_())
                continue
            narrow = weight[:, :, 3:].permute(0, 2, 1).contiguous()
            if self._scales:
                narrow.mul_(2)
            self.up.data.copy_(narrow)


def test_transposed_tensors_and_zeros_are_traced() -> None:
    shapes = {"up": (2, 4, 6), "bias": (2, 4)}
    trace = LoadTrace.of(ExpertsWithBiases(scales=False), shapes, torch.float32)
    (region,) = trace.regions
    assert (region.name, region.box) == ("up", Box(start=(0, 0, 3), size=(2, 4, 3)))
    assert region.target_strides == (12, 1, 4)
    assert not trace.untraceable and not trace.unfilled
    trace = LoadTrace.of(ExpertsWithBiases(scales=True), shapes, torch.float32)
    assert not trace.regions and "computes with the values" in trace.untraceable[0]


TRACE = LoadTrace(
    regions=(), unfilled=("w13 (3 of 4 elements)",), other_dtypes=(), untraceable=("up (4, 6): x",)
)


def test_what_the_engines_own_folder_lacks_is_refused_on_every_route() -> None:
    shapes = {"up": (4, 6), "strange": (1,)}
    with pytest.raises(ValueError, match=r"own folder does not have: strange$"):
        check_traces([TRACE], shapes, torch.float32, foreign={"strange"}, is_copy=False)
    check_traces([TRACE], shapes, torch.float32, is_copy=False)
    with pytest.raises(ValueError, match=r"cannot take: up \(4, 6\)"):
        check_traces([TRACE], shapes, torch.float32, is_copy=True)


LORA = LoraSection(rank=3, alpha=6.0, targets=("q_proj", "up_proj"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "hf", num_experts=2, top_k=1)


def receive(tensors: Mapping[str, torch.Tensor], file: Path) -> WeightLayout:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = merged_layout(shapes, shapes, torch.float32)
    image = ReceiveBuffer(file, layout).image(0).view(torch.float32)
    for name, place in whole_tensors(layout, [image]):
        place.copy_(tensors[name])
    return layout


def merge(folder: Path, adapter: Mapping[str, torch.Tensor], taken: set[str]) -> dict[str, torch.Tensor]:
    """The tensors that the engine takes."""
    shapes = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    merged = merged_layout(shapes, sorted(taken), torch.float32)
    fetched, out = folder.parent / "fetched", folder.parent / "out"
    merger = AdapterMerger(
        base=folder,
        scaling=LORA.alpha / LORA.rank,
        adapters=receive(adapter, fetched),
        fetched=fetched,
        merged=merged,
        out=out,
    )
    merger.merge()
    return {name: t.clone() for name, t in whole_tensors(merged, received_images(out, merged))}


def test_every_adapter_is_merged(folder: Path, tmp_path: Path) -> None:
    adapter = random_adapter(folder, LORA)
    wanted = load_file(write_merged(folder, adapter, LORA, tmp_path / "merged") / "model.safetensors")
    found = merge(folder, adapter, set(wanted))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    base = load_file(folder / "model.safetensors")
    changed = [name for name, tensor in base.items() if not torch.equal(tensor, wanted[name])]
    assert len(changed) == len(adapter) / 2 == 2 * (1 + 2), "of two layers: q_proj and two experts' up_proj"


def test_adapters_of_what_the_engine_does_not_take_are_refused(folder: Path) -> None:
    adapter = random_adapter(folder, LORA)
    taken = {name for name in load_file(folder / "model.safetensors") if "q_proj" not in name}
    with pytest.raises(ValueError, match=r"does not take model\.layers\.0\.self_attn\.q_proj\.weight, "):
        merge(folder, adapter, taken)


def test_half_an_adapter_is_refused(folder: Path) -> None:
    adapter = random_adapter(folder, LORA)
    half = {name: tensor for name, tensor in adapter.items() if "experts.1.up_proj.lora_B" not in name}
    taken = set(load_file(folder / "model.safetensors"))
    with pytest.raises(ValueError, match=r"half is missing of .*layers\.0\.mlp\.experts\.1\.up_proj\.lora_B"):
        merge(folder, half, taken)
