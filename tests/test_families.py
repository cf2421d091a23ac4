"""Every model family: the trainer against transformers, files there and back, a step under layouts."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.config.checkpoint_shapes import check_checkpoint_shapes
from forgeasync.config.loss_schema import LossSection
from forgeasync.config.model_facts import read_model_facts
from forgeasync.config.schema import (
    OptimizerSection,
    ParallelSection,
    RouterBias,
    TrainerSection,
)
from forgeasync.trainer import hf_checkpoint
from forgeasync.trainer.loss import build_loss
from forgeasync.trainer.packing import TrainingSequence, pack_row, pack_rows
from forgeasync.trainer.policy_trainer import PolicyTrainer
from tests.support.families import VARIANTS, write_family
from tests.support.processes import run_ranks

TOKENS_PER_ROW = 128


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {variant: write_family(root / variant, variant) for variant in VARIANTS}


def make_trainer(
    folder: Path,
    parallel: ParallelSection,
    *,
    router_bias: RouterBias = RouterBias.FROZEN,
) -> PolicyTrainer:
    section = TrainerSection(
        parallel=parallel,
        tokens_per_row=TOKENS_PER_ROW,
        router_bias=router_bias,
        router_bias_speed=0.01,
        # A large step, so that a wrong gradient shows in the weights.
        optimizer=OptimizerSection(learning_rate=1e-2, max_grad_norm=0.1, eps=1e-3),
    )
    return PolicyTrainer(
        section=section,
        facts=read_model_facts(str(folder)),
        temperature=1.0,
        loss=build_loss(LossSection()),
        seed=0,
        checkpoint=folder,
    )


def make_sequences(num_sequences: int, vocab_size: int) -> list[TrainingSequence]:
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(num_sequences):
        response = rng.integers(0, vocab_size, rng.integers(3, 60)).astype(np.int32)
        sequences.append(
            TrainingSequence(
                prompt_ids_P=rng.integers(0, vocab_size, rng.integers(1, 20)).astype(np.int32),
                response_ids_T=response,
                behavior_logprobs_T=(-3.0 + 0.3 * rng.standard_normal(len(response))).astype(np.float32),
                ages_T=np.zeros(len(response), np.int32),
                advantage=float(rng.standard_normal()),
            )
        )
    return sequences


def _logprobs(folders: dict[str, Path], sequences: list[TrainingSequence]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            variant: make_trainer(folder, ParallelSection()).logprobs(pack_row(sequences))
            for variant, folder in folders.items()
        }


def test_logprobs_are_those_of_transformers(folders: dict[str, Path]) -> None:
    facts = read_model_facts(str(folders["llama"]))
    sequences = make_sequences(3, facts.vocab_size)
    # One as long as positions go: rotary scaling shows in late ones.
    rng = np.random.default_rng(1)
    ids = rng.integers(0, facts.vocab_size, 150).astype(np.int32)
    long = dataclasses.replace(
        sequences[0],
        prompt_ids_P=ids[:1],
        response_ids_T=ids[1:],
        behavior_logprobs_T=np.zeros(149, np.float32),
        ages_T=np.zeros(149, np.int32),
    )
    sequences.append(long)
    found = run_ranks(1, _logprobs, folders, sequences)[0]
    for variant, folder in folders.items():
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = []
        for sequence in sequences:
            ids = torch.from_numpy(np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T])).long()
            with torch.no_grad():
                logprobs = torch.log_softmax(reference(ids[None]).logits[0].double(), -1)
            num_prompt = len(sequence.prompt_ids_P)
            rows.append(logprobs[num_prompt - 1 : -1].gather(1, ids[num_prompt:, None])[:, 0])
        expected = torch.cat(rows)
        torch.testing.assert_close(found[variant].double(), expected, atol=1e-4, rtol=0, msg=variant)
        assert expected.std() > 0.3, f"{variant}: a nearly uniform model would hide mistakes"


def _round_trips(folders: dict[str, Path], out: Path, parallel: ParallelSection) -> None:
    for variant, folder in folders.items():
        trainer = make_trainer(folder, parallel)
        hf_checkpoint.save(trainer.model, trainer._facts, out / variant, source=folder, max_file_bytes=40_000)


def test_files_there_and_back_are_bit_exact(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, _round_trips, folders, tmp_path, ParallelSection(num_procs=2))
    for variant, source in folders.items():
        folder = tmp_path / variant
        before = load_file(source / "model.safetensors")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        after: dict[str, torch.Tensor] = {}
        files = sorted(set(index["weight_map"].values()))
        assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert len(files) > 1 and {path.name for path in folder.glob("*.safetensors")} == set(files)
        for file in files:
            tensors = load_file(folder / file)
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 40_000
            assert all(index["weight_map"][name] == file for name in tensors)
            after |= tensors
        assert before.keys() == after.keys(), variant
        assert all(torch.equal(before[name], after[name]) for name in before), variant
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
        assert check_checkpoint_shapes(folder, read_model_facts(str(folder))) == []
        for file in ("config.json", "tokenizer.json", "generation_config.json"):
            assert (folder / file).read_text() == (source / file).read_text()
        loaded, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not report["missing_keys"] and not report["unexpected_keys"], variant
        original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        for name, tensor in original.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), (variant, name)


def _steps(
    folders: dict[str, Path], parallel: ParallelSection, sequences: list[TrainingSequence]
) -> dict[str, tuple[dict[str, float], dict[str, torch.Tensor]]]:
    results = {}
    for variant, folder in folders.items():
        bias = RouterBias.UPDATED if variant.startswith("deepseek") else RouterBias.FROZEN
        trainer = make_trainer(folder, parallel, router_bias=bias)
        rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
        result = trainer.train_step(rows[trainer.data_rank])
        weights = hf_checkpoint.full_tensors(trainer.model, trainer._facts)
        results[variant] = (result.metrics, {name: tensor.clone() for name, tensor in weights})
    return results


@pytest.mark.parametrize(
    ("variants", "parallel"),
    [
        pytest.param(("qwen3", "llama", "deepseek_v3"), ParallelSection(num_procs=2), id="fsdp2"),
        pytest.param(("qwen3_tied", "llama3_rope"), ParallelSection(num_procs=2, tensor=2), id="dense-tp2"),
        pytest.param(
            ("deepseek_v3", "deepseek_v3_one_group"),
            ParallelSection(num_procs=2, tensor=2, expert=2),
            id="deepseek-tp2-ep2",
        ),
        pytest.param(("llama",), ParallelSection(num_procs=2, context=2), id="llama-cp2"),
    ],
)
def test_a_step_is_the_same_under_every_layout(
    folders: dict[str, Path], variants: tuple[str, ...], parallel: ParallelSection
) -> None:
    chosen = {variant: folders[variant] for variant in variants}
    sequences = make_sequences(7, read_model_facts(str(folders["llama"])).vocab_size)
    single = run_ranks(1, _steps, chosen, ParallelSection(), sequences)[0]
    for of_rank in run_ranks(parallel.num_procs, _steps, chosen, parallel, sequences):
        for variant, (metrics, weights) in single.items():
            found_metrics, found_weights = of_rank[variant]
            for name in ("loss", "grad_norm", "mismatch/kl"):
                assert found_metrics[name] == pytest.approx(metrics[name], rel=1e-4), (variant, name)
            before = load_file(folders[variant] / "model.safetensors")
            assert found_weights.keys() == before.keys()
            for name, expected in weights.items():
                torch.testing.assert_close(
                    found_weights[name], expected, atol=2e-5, rtol=1e-4, msg=f"{variant} {name}"
                )
                # An expert may have got no token.
                if ".experts." not in name:
                    assert not torch.equal(expected, before[name]), f"{variant} {name} was not trained"
