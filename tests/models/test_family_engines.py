"""Every model family in vLLM: what it samples has the trainer's log-probabilities, also after an update."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forgeasync.config import GeneratorSection, Interruption, KvAfterSwap, SamplingSection, WeightsSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import CaptureSpec, Rollout, check_rollout
from forgeasync.trainer import PackedRow, TrainingSequence, pack_row
from tests.gpu_path.test_adapters import ATTENTION, adapters_of, sample_before_and_after
from tests.support.engines import let_decode, sample_all, start_engine
from tests.support.families import write_family, write_mxfp4
from tests.support.peft_adapters import random_adapter, write_merged
from tests.support.processes import run_alone, run_ranks
from tests.support.trainers import make_trainer, plain_sequence
from tests.support.weight_service import FolderPublisher

SAMPLING = SamplingSection(temperature=0.9, top_p=0.9, max_response_tokens=40)

ENGINE_VARIANTS = (
    *("qwen3_tied", "llama3_rope", "deepseek_v3_yarn", "kimi_k2", "glm4_moe", "glm4_moe_air"),
    *("qwen3_5", "qwen3_5_moe_vision", "gpt_oss", "gpt_oss_window_1"),
)


def _records(folder: Path) -> CaptureSpec:
    facts = read_model_facts(str(folder))
    return CaptureSpec(
        routing=facts.num_experts > 0, kept_tokens=True, num_dense_layers=facts.num_dense_layers
    )


async def _sample(before: Path, after: Path, out: Path) -> dict[int, tuple[Rollout, ...]]:
    generator = GeneratorSection(max_num_seqs=8, max_num_batched_tokens=256, kv_cache_gib=0.05)
    engine = await start_engine(before, generator, records=_records(before))
    try:
        publisher = FolderPublisher(before, out)
        receiver = await publisher.connect(engine, out / "receive-buffer")
        prompt = np.arange(3, 12, dtype=np.int32)
        rollouts = {0: await engine.generate(prompt_ids_P=prompt, num_samples=3, sampling=SAMPLING)}
        await receiver.begin(publisher.stage(1, 1, load_file(after / "model.safetensors")))
        await receiver.stage()
        await receiver.finish()
        rollouts[1] = await engine.generate(prompt_ids_P=prompt, num_samples=3, sampling=SAMPLING)
        return rollouts
    finally:
        engine.shutdown()


def _sample_all(
    folders: Mapping[str, tuple[Path, Path]], out: Path
) -> dict[str, dict[int, tuple[Rollout, ...]]]:
    rollouts = {}
    for variant, (before, after) in folders.items():
        (out / variant).mkdir()
        rollouts[variant] = asyncio.run(_sample(before, after, out / variant))
    return rollouts


def _trained_logprobs(folder: Path, rollouts: tuple[Rollout, ...]) -> tuple[torch.Tensor, float]:
    """Through recorded experts, and how many of those the trainer's routers would not have taken."""
    trainer = make_trainer(folder, temperature=SAMPLING.temperature, tokens_per_row=512)
    row = pack_row(
        [
            TrainingSequence(
                prompt_ids_P=rollout.prompt_ids_P,
                response_ids_T=rollout.response_ids_T,
                behavior_logprobs_T=rollout.logprobs_T,
                ages_T=np.zeros(rollout.num_response_tokens, np.int32),
                advantage=1.0,
                kept_tokens=rollout.kept_tokens,
                expert_ids_SMK=None if rollout.routed_experts is None else rollout.routed_experts.to_dense(),
            )
            for rollout in rollouts
        ]
    )
    with torch.no_grad():
        logprobs_T = trainer.logprobs(row)
    routers = trainer._forward.routers
    return logprobs_T, float(sum(router.replay_counts[1] for router in routers))


def _train_all(
    folders: Mapping[str, tuple[Path, Path]], rollouts: Mapping[str, Mapping[int, tuple[Rollout, ...]]]
) -> dict[tuple[str, int], tuple[torch.Tensor, float]]:
    return {
        (variant, version): _trained_logprobs(folders[variant][version], group)
        for variant, versions in rollouts.items()
        for version, group in versions.items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("families")
    return {
        variant: (
            write_family(root / f"{variant}-before", variant, seed=0),
            write_family(root / f"{variant}-after", variant, seed=1),
        )
        for variant in ENGINE_VARIANTS
    } | {
        "gpt_oss_mxfp4": (
            write_mxfp4(root / "mxfp4-before", "gpt_oss"),
            write_family(root / "mxfp4-after", "gpt_oss", seed=1),
        )
    }


def test_samples_have_the_trainers_logprobs(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    rollouts = run_alone(_sample_all, folders, tmp_path)
    trained = run_ranks(1, _train_all, folders, rollouts)[0]
    for variant, versions in rollouts.items():
        for version, group in versions.items():
            for rollout in group:
                assert [span.version for span in rollout.version_spans] == [version]
                facts = read_model_facts(str(folders[variant][0]))
                check_rollout(rollout, _records(folders[variant][0]), facts)
            logprobs_T, num_other_choices = trained[variant, version]
            sampled_T = np.concatenate([rollout.logprobs_T for rollout in group])
            np.testing.assert_allclose(
                sampled_T, logprobs_T.numpy(), atol=1e-4, err_msg=f"{variant}, version {version}"
            )
            assert num_other_choices == 0, variant


@pytest.mark.exhaustive
def test_layers_that_vllm_renames_have_adapters(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, lora = folders["gpt_oss"][0], adapters_of(ATTENTION)
    adapter = random_adapter(folder, lora)
    sampled = run_alone(sample_before_and_after, folder, lora, adapter, tmp_path, None)
    by_version = {"gpt_oss": (folder, write_merged(folder, adapter, lora, tmp_path / "merged"))}
    trained = run_ranks(1, _train_all, by_version, {"gpt_oss": dict(enumerate(map(tuple, sampled)))})[0]
    for version, group in enumerate(sampled):
        logprobs_T, num_other_choices = trained["gpt_oss", version]
        sampled_T = np.concatenate([rollout.logprobs_T for rollout in group])
        np.testing.assert_allclose(sampled_T, logprobs_T.numpy(), atol=1e-4)
        assert num_other_choices == 0


HYBRID = "qwen3_5"

WEIGHTS = {
    "recompute": WeightsSection(kv_cache=KvAfterSwap.RECOMPUTE),
    "abort_and_resume": WeightsSection(interruption=Interruption.ABORT_AND_RESUME),
    "keep": WeightsSection(kv_cache=KvAfterSwap.KEEP),
}
"""How an update reaches running sequences of a model with recurrent states."""


async def _cross(before: Path, after: Path, out: Path, weights: WeightsSection) -> list[Rollout]:
    generator = GeneratorSection(max_num_seqs=16, max_num_batched_tokens=48, kv_cache_gib=0.05)
    engine = await start_engine(before, generator, weights, records=_records(before))
    try:
        publisher = FolderPublisher(before, out)
        receiver = await publisher.connect(engine, out / "receive-buffer")
        rng = np.random.default_rng(0)
        prompts = [rng.integers(3, 15, num).astype(np.int32) for num in (1, 9, 47, 48, 49, 64, 100, 130)]
        # States of the prompts are cached, and taken up again, but not by the requests after the update.
        once = SamplingSection(max_response_tokens=20)
        old = await sample_all(engine, prompts, once, num_samples=1)
        running = asyncio.create_task(
            sample_all(engine, prompts, SamplingSection(max_response_tokens=28), num_samples=2)
        )
        await let_decode(engine, 6)
        await receiver.begin(publisher.stage(1, 1, load_file(after / "model.safetensors")))
        await receiver.stage()
        await receiver.finish()
        new = await sample_all(engine, prompts, once, num_samples=1)
        assert {span.version for one in new for span in one.version_spans} == {1}
        return [*old, *await running, *new]
    finally:
        engine.shutdown()


def _cross_all(folders: tuple[Path, Path], out: Path) -> dict[str, list[Rollout]]:
    found = {}
    for name, weights in WEIGHTS.items():
        (out / name).mkdir()
        found[name] = asyncio.run(_cross(*folders, out / name, weights))
    return found


def _versions(rollout: Rollout) -> np.ndarray:
    return np.concatenate([np.full(one.end - one.start, one.version) for one in rollout.version_spans])


def _row(rollout: Rollout) -> PackedRow:
    ages_T = (1 - _versions(rollout)).astype(np.int32)
    known = {"ages_T": ages_T, "behavior_logprobs_T": rollout.logprobs_T}
    return pack_row([plain_sequence(rollout.prompt_ids_P, rollout.response_ids_T, **known)])


def _trained_all(
    folders: tuple[Path, Path], rollouts: Mapping[str, list[Rollout]]
) -> tuple[dict[tuple[str, int], list[torch.Tensor]], dict[str, float]]:
    """Log-probabilities by both versions, and what a step of the new one says of the states."""
    found = {}
    for version, folder in enumerate(folders):
        trainer = make_trainer(folder, tokens_per_row=512)
        for name, of_name in rollouts.items():
            with torch.no_grad():
                found[name, version] = [trainer.logprobs(_row(one)) for one in of_name]
    measured = {}
    for name, of_name in rollouts.items():
        trainer = make_trainer(folders[1], tokens_per_row=512)
        metrics = trainer.train_step([_row(one) for one in of_name]).metrics
        measured[name] = metrics["mismatch/recurrent_state"]
    return found, measured


def test_states_are_computed_again_after_an_update_or_their_mismatch_is_measured(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    rollouts = run_alone(_cross_all, folders[HYBRID], tmp_path)
    trained, measured = run_ranks(1, _trained_all, folders[HYBRID], rollouts)[0]
    for name, of_name in rollouts.items():
        after = []
        for index, rollout in enumerate(of_name):
            versions_T = _versions(rollout)
            is_after_T = (versions_T == 1) & (versions_T[0] == 0)
            wanted = np.where(versions_T, *(trained[name, version][index].numpy() for version in (1, 0)))
            found, known = rollout.logprobs_T, ~is_after_T | (name != "keep")
            np.testing.assert_allclose(found[known], wanted[known], atol=4e-4, err_msg=f"{name}, {index}")
            after += list(np.abs(found - wanted)[is_after_T])
        # How many of them have ended before the update depends on the machine.
        assert after, name
        assert measured[name] == pytest.approx(np.mean(after), abs=1e-5), name
    assert max(measured["recompute"], measured["abort_and_resume"]) < 1e-4 < measured["keep"] / 100
