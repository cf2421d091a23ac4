"""Every model family in vLLM: what it samples has the trainer's log-probabilities, also after an update."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import CaptureSpec, Rollout, check_rollout
from forgeasync.trainer import TrainingSequence, pack_row
from tests.support.engines import start_engine
from tests.support.families import write_family
from tests.support.processes import run_alone, run_ranks
from tests.support.trainers import make_trainer
from tests.support.weight_service import FolderPublisher

SAMPLING = SamplingSection(temperature=0.9, top_p=0.9, max_response_tokens=40)

ENGINE_VARIANTS = ("qwen3_tied", "llama3_rope", "deepseek_v3_yarn", "kimi_k2", "glm4_moe", "glm4_moe_air")


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
