"""Adapters that vLLM's GPU path serves: every module of them is applied, those of experts too."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.config import ADAPTABLE, EXPERT_TARGETS, GeneratorSection, LoraSection, SamplingSection
from forgeasync.rollouts import Rollout
from forgeasync.testing import write_tiny_model
from tests.support.engines import assert_logprobs, assert_routing, expected, nothing_to_fetch, start_engine
from tests.support.gpu_runner import run_on_gpu_runner
from tests.support.peft_adapters import random_adapter, write_merged
from tests.support.processes import ProcessFailed, run_alone

SAMPLING = SamplingSection(temperature=0.9, top_k=20, top_p=0.9, max_response_tokens=6)
ATTENTION = ("q_proj", "v_proj", "o_proj")
SOME_OF_EXPERTS = ("gate_proj", "down_proj")
"""vLLM takes three projections or none."""


def adapters_of(targets: tuple[str, ...]) -> LoraSection:
    # A rank that vLLM does not know and fills up, and a scale other than 1.
    return LoraSection(rank=3, alpha=6.0, targets=targets)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "hf", scale=12.0, num_experts=8, top_k=3)


async def sample_before_and_after(
    folder: Path, lora: LoraSection, adapter: dict[str, torch.Tensor], out: Path, modules: list[str] | None
) -> tuple[list[Rollout], list[Rollout]]:
    """Rollouts of an engine at version 0 and at version 1, which has the adapter.

    With ``modules`` vLLM is told to wrap these layers instead of those that the engine names.
    """
    from forgeasync.generator import AdapterSetup, install
    from forgeasync.generator import engine as engine_module

    if modules is not None:
        engine_module.engine_modules = lambda _: modules
    shapes = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    generator = GeneratorSection(max_num_seqs=4, max_num_batched_tokens=12, kv_cache_gib=0.002)
    engine = await start_engine(
        folder, generator, adapters=AdapterSetup(lora=lora, shapes=shapes, folder=out / "adapter")
    )
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (4, 13)]

    async def sample() -> list[Rollout]:
        groups = [engine.generate(prompt_ids_P=one, num_samples=1, sampling=SAMPLING) for one in prompts]
        return [rollout for group in await asyncio.gather(*groups) for rollout in group]

    before = await sample()
    request = engine.adapter.write(1, adapter)
    await engine.update_weights(1, prefetch=nothing_to_fetch, install=lambda core: install(core, request))
    after = await sample()
    engine.shutdown()
    return before, after


def models_of(
    folder: Path, lora: LoraSection, adapter: dict[str, torch.Tensor], out: Path
) -> dict[int, torch.nn.Module]:
    """transformers' models by version, in float32."""
    folders = (folder, write_merged(folder, adapter, lora, out))
    return {
        version: AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
        for version, one in enumerate(folders)
    }


@pytest.mark.parametrize(
    ("targets", "start"),
    [
        pytest.param(SOME_OF_EXPERTS, run_on_gpu_runner, id="gpu-some-of-experts"),
        pytest.param(EXPERT_TARGETS, run_on_gpu_runner, id="gpu-experts", marks=pytest.mark.exhaustive),
        pytest.param(ADAPTABLE, run_on_gpu_runner, id="gpu-all", marks=pytest.mark.exhaustive),
        pytest.param(("up_proj",), run_on_gpu_runner, id="gpu-up", marks=pytest.mark.exhaustive),
        pytest.param(ATTENTION, run_alone, id="cpu-attention", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.engine
def test_the_engine_samples_under_the_adapters(
    folder: Path, targets: tuple[str, ...], start: object, tmp_path: Path
) -> None:
    lora = adapters_of(targets)
    adapter = random_adapter(folder, lora)
    sampled = start(sample_before_and_after, folder, lora, adapter, tmp_path, None)
    models = models_of(folder, lora, adapter, tmp_path / "merged")
    for version, rollouts in enumerate(sampled):
        for rollout in rollouts:
            assert [span.version for span in rollout.version_spans] == [version]
            exact = expected(models, rollout, recomputed=True)
            assert_logprobs(rollout, exact, SAMPLING)
            assert_routing(rollout, exact)


def test_adapters_that_vllm_passes_over_stop_the_engine(folder: Path, tmp_path: Path) -> None:
    lora = adapters_of(SOME_OF_EXPERTS)
    # The names of the projections alone: vLLM then loads what belongs to experts and leaves it aside.
    modules = ["qkv_proj", "gate_proj", "down_proj"]
    with pytest.raises(ProcessFailed, match=r"AdapterNotApplied: worker 0 .*\.experts\.0\.down_proj.* more"):
        run_on_gpu_runner(sample_before_and_after, folder, lora, {}, tmp_path, modules)


def test_layers_that_are_wrapped() -> None:
    from forgeasync.generator import AdapterSetup, engine_modules

    dense = {f"model.layers.0.mlp.{name}.weight": (8, 8) for name in ("gate_proj", "up_proj", "down_proj")}
    experts = {name.replace("mlp", f"mlp.experts.{e}"): s for name, s in dense.items() for e in range(2)}
    for shapes, targets, layers in (
        (dense, ("k_proj", "up_proj"), ["qkv_proj", "up_proj"]),
        (experts, ("k_proj", "up_proj"), ["experts", "qkv_proj", "up_proj"]),
        (experts, ATTENTION, ["o_proj", "qkv_proj"]),
    ):
        setup = AdapterSetup(lora=adapters_of(targets), shapes=shapes, folder=Path("unused"))
        assert engine_modules(setup) == layers
