"""Weights on their way from the trainer mesh into a running vLLM engine: real procs, real torchstore.

One fleet serves all tests of the file: trainer (FSDP2 with expert parallelism 2), generator, weight store.
"""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.actors.fleet import Fleet
from forgeasync.actors.router import GeneratorRouter
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.config.model_facts import read_model_facts
from forgeasync.config.schema import Dtype, RunConfig, SamplingSection
from forgeasync.data.rollout import Rollout
from forgeasync.trainer.objectives import PpoClip
from forgeasync.trainer.packing import TrainingSequence, pack_rows
from tests.support.models import write_random_model
from tests.support.runs import tiny_config

SAMPLING = SamplingSection(temperature=0.8, max_response_tokens=24)
NUM_UPDATES = 3


@dataclass(slots=True, kw_only=True)
class Measured:
    """What the one scenario below saw."""

    fresh: list[Rollout]
    fresh_difference: float
    parameters: list[dict[str, torch.Tensor]]
    exported: dict[str, torch.Tensor]
    after: list[Rollout]
    after_difference: float
    crossing: list[Rollout]
    seeded: tuple[list[int], list[int]]


def _sequences(rollouts: list[Rollout], version: int) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            prompt_ids_P=rollout.prompt_ids_P,
            response_ids_T=rollout.response_ids_T,
            behavior_logprobs_T=rollout.logprobs_T,
            ages_T=np.full(rollout.num_response_tokens, version - rollout.first_version, np.int32),
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, rollout in enumerate(rollouts)
    ]


async def _train_on(trainer: TrainerMesh, rollouts: list[Rollout], version: int) -> float:
    rows = pack_rows(_sequences(rollouts, version), tokens_per_row=256, num_ranks=trainer.num_data_ranks)
    result = await trainer.train_step(rows)
    return result.metrics["mismatch/logprob_abs_max"]


async def _sample(generators: GeneratorRouter, *, seed: int | None = None) -> list[Rollout]:
    groups = await asyncio.gather(
        *(
            generators.generate(
                np.arange(3, 3 + n, dtype=np.int32), num_samples=4, sampling=SAMPLING, seed=seed
            )
            for n in (1, 5, 9)
        )
    )
    return [rollout for group in groups for rollout in group]


async def _sync(trainer: TrainerMesh, generators: GeneratorRouter) -> None:
    await generators.update_weights(await trainer.publish(Dtype.FLOAT32))


async def _scenario(config: RunConfig, folder: Path, out: Path) -> Measured:
    fleet = Fleet(out / "logs")
    try:
        async with asyncio.TaskGroup() as starting:
            starting.create_task(fleet.start_weight_store())
            generators_task = starting.create_task(fleet.start_generators(config, folder))
            trainer_task = starting.create_task(
                fleet.start_trainer(
                    config,
                    config.trainer,
                    read_model_facts(str(folder)),
                    objective=PpoClip(clip_low=0.2, clip_high=0.28),
                    seed=0,
                    checkpoint=folder,
                )
            )
        trainer, generators = trainer_task.result(), generators_task.result()
        fresh = await _sample(generators)
        fresh_difference = await _train_on(trainer, fresh, 0)
        for version in range(1, NUM_UPDATES):
            await _sync(trainer, generators)
            await _train_on(trainer, await _sample(generators), version)
        await trainer.save_hf(out / "exported", source=folder)
        is_synced = asyncio.Event()
        # Two at a time, so that one is in flight whenever the update comes.
        sampling = [asyncio.create_task(_sample_until(is_synced, generators)) for _ in range(2)]
        await asyncio.sleep(0.1)
        await _sync(trainer, generators)
        is_synced.set()
        crossing = [rollout for task in sampling for rollout in await task]
        replica = generators._replicas[0]
        parameters = await replica.parameters.call_one()
        after = await _sample(generators)
        first, second = [(await _sample(generators, seed=7))[0].response_ids_T.tolist() for _ in range(2)]
        return Measured(
            fresh=fresh,
            fresh_difference=fresh_difference,
            parameters=parameters,
            exported=load_file(out / "exported" / "model-00001.safetensors"),
            after=after,
            after_difference=await _train_on(trainer, after, NUM_UPDATES),
            crossing=crossing,
            seeded=(first, second),
        )
    finally:
        await fleet.close()


async def _sample_until(is_synced: asyncio.Event, generators: GeneratorRouter) -> list[Rollout]:
    rollouts: list[Rollout] = []
    while not is_synced.is_set():
        rollouts += await _long_sample(generators)
    return rollouts


async def _long_sample(generators: GeneratorRouter) -> list[Rollout]:
    sampling = SamplingSection(max_response_tokens=140)
    prompt = np.arange(3, 13, dtype=np.int32)
    return list(await generators.generate(prompt, num_samples=192, sampling=sampling))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "hf", scale=3.0)


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    config = tiny_config(folder).model_copy(update={"sampling": SAMPLING})
    yield asyncio.run(_scenario(config, folder, tmp_path_factory.mktemp("out")))


def test_fresh_logprobs_of_sampler_and_trainer_agree(measured: Measured) -> None:
    assert measured.fresh_difference < 1e-4
    assert measured.after_difference < 1e-4, "after updates the engine must compute with the new weights"
    spread = np.concatenate([rollout.logprobs_T for rollout in measured.fresh]).std()
    assert spread > 0.3, "a nearly uniform model would hide mistakes"


def test_engine_parameters_equal_the_trainers_bit_for_bit(measured: Measured) -> None:
    exported = measured.exported
    (engine,) = measured.parameters

    def expect(name: str, *hf_names: str) -> None:
        expected = torch.cat([exported[hf_name] for hf_name in hf_names])
        assert torch.equal(engine.pop(name), expected), name

    expect("model.norm.weight", "model.norm.weight")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        # The engine pads its vocabulary.
        rows, padding = engine.pop(name).tensor_split([exported[name].shape[0]])
        assert torch.equal(rows, exported[name]) and not padding.any()
    for layer in (f"model.layers.{i}" for i in range(2)):
        attention = f"{layer}.self_attn"
        expect(f"{attention}.qkv_proj.weight", *(f"{attention}.{x}_proj.weight" for x in "qkv"))
        for name in ("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate"):
            expect(f"{layer}.{name}.weight", f"{layer}.{name}.weight")
        for name in ("input_layernorm", "post_attention_layernorm"):
            expect(f"{layer}.{name}.weight", f"{layer}.{name}.weight")
        w13 = next(name for name in engine if name.startswith(layer) and name.endswith("w13_weight"))
        w2 = next(name for name in engine if name.startswith(layer) and name.endswith("w2_weight"))
        gate_up, down = engine.pop(w13), engine.pop(w2)
        for expert in range(4):
            mlp = f"{layer}.mlp.experts.{expert}"
            expected = torch.cat([exported[f"{mlp}.{x}_proj.weight"] for x in ("gate", "up")])
            assert torch.equal(gate_up[expert], expected)
            assert torch.equal(down[expert], exported[f"{mlp}.down_proj.weight"])
    assert not engine, f"parameters that nothing was compared with: {sorted(engine)}"


def test_the_updates_changed_every_weight(measured: Measured, folder: Path) -> None:
    before = load_file(folder / "model.safetensors")
    assert not [name for name in before if torch.equal(before[name], measured.exported[name])]


def test_tokens_carry_the_version_that_produced_them(measured: Measured) -> None:
    assert {span.version for rollout in measured.fresh for span in rollout.version_spans} == {0}
    assert {span.version for rollout in measured.after for span in rollout.version_spans} == {NUM_UPDATES}
    for rollout in measured.crossing:
        spans = rollout.version_spans
        assert spans[0].start == 0 and spans[-1].end == rollout.num_response_tokens
        assert all(a.end == b.start and a.version < b.version for a, b in itertools.pairwise(spans))


def test_running_sequences_go_on_under_the_new_weights(measured: Measured) -> None:
    crossed = [rollout for rollout in measured.crossing if len(rollout.version_spans) == 2]
    assert crossed, "no sequence was running during the update"
    assert all(
        [span.version for span in rollout.version_spans] == [NUM_UPDATES - 1, NUM_UPDATES]
        for rollout in crossed
    )


def test_sampling_with_a_seed_is_reproducible(measured: Measured) -> None:
    assert measured.seeded[0] == measured.seeded[1]


def test_logprobs_are_those_of_the_sampled_distribution(measured: Measured, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for rollout in measured.fresh:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids_P, rollout.response_ids_T])).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double() / SAMPLING.temperature
        exact = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[1:, None])[:, 0]
        exact_T = exact[len(rollout.prompt_ids_P) - 1 :]
        torch.testing.assert_close(torch.from_numpy(rollout.logprobs_T).double(), exact_T, atol=1e-4, rtol=0)
