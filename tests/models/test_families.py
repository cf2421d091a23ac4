"""Every model family: the trainer against transformers, files there and back, a step under layouts."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.config import ParallelSection, RouterBias
from forgeasync.models import check_checkpoint_shapes, read_model_facts
from forgeasync.trainer import TrainingSequence, hf_checkpoint, pack_row, pack_rows
from tests.support.families import VARIANTS, write_family
from tests.support.processes import run_ranks
from tests.support.trainers import TOKENS_PER_ROW, make_trainer

MAX_FILE_BYTES = 40_000

SPEED = 0.01

ROUTED = frozenset(variant for variant in VARIANTS if variant.startswith(("deepseek", "qwen3_moe")))

ROUTER_BIAS = {
    variant: RouterBias.UPDATED if variant.startswith("deepseek") else RouterBias.FROZEN
    for variant in VARIANTS
}

LAYOUTS: tuple[tuple[tuple[str, ...], ParallelSection], ...] = (
    (("qwen3_tied", "llama3_rope", "deepseek_v3"), ParallelSection(num_procs=2)),
    (("qwen3_tied", "llama3_rope"), ParallelSection(num_procs=2, tensor=2)),
    (("qwen3_tied", "deepseek_v3"), ParallelSection(num_procs=2, tensor=2, sequence=False)),
    (("deepseek_v3", "deepseek_v3_one_group"), ParallelSection(num_procs=2, tensor=2, expert=2)),
    (("llama3_rope", "deepseek_v3"), ParallelSection(num_procs=2, context=2)),
)

STEPPED = frozenset(variant for variants, _ in LAYOUTS for variant in variants)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {variant: write_family(root / variant, variant) for variant in VARIANTS}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step says of itself, and the weights after it."""

    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]


def _step(
    folder: Path, parallel: ParallelSection, sequences: list[TrainingSequence], router_bias: RouterBias
) -> Step:
    trainer = make_trainer(folder, parallel, router_bias=router_bias, router_bias_speed=SPEED)
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
    result = trainer.train_step(rows[trainer.data_rank])
    weights = hf_checkpoint.full_tensors(trainer.model, trainer._facts)
    return Step(metrics=result.metrics, weights={name: tensor.clone() for name, tensor in weights})


@pytest.fixture(scope="module")
def sequences(folders: dict[str, Path]) -> list[TrainingSequence]:
    """The last is as long as positions go: rotary scaling shows in late ones."""
    vocab_size = read_model_facts(str(folders["llama"])).vocab_size
    rng = np.random.default_rng(0)
    lengths = [*((int(rng.integers(1, 20)), int(rng.integers(3, 60))) for _ in range(7)), (1, 127)]
    return [
        TrainingSequence(
            prompt_ids_P=rng.integers(0, vocab_size, num_prompt).astype(np.int32),
            response_ids_T=rng.integers(0, vocab_size, num_response).astype(np.int32),
            behavior_logprobs_T=(-3.0 + 0.3 * rng.standard_normal(num_response)).astype(np.float32),
            ages_T=np.zeros(num_response, np.int32),
            advantage=float(rng.standard_normal()),
        )
        for num_prompt, num_response in lengths
    ]


Alone = tuple[dict[str, torch.Tensor], dict[str, Step], Step]


def _alone(folders: dict[str, Path], sequences: list[TrainingSequence]) -> Alone:
    with torch.no_grad():
        logprobs = {
            variant: make_trainer(folder).logprobs(pack_row(sequences)) for variant, folder in folders.items()
        }
    steps = {
        variant: _step(folder, ParallelSection(), sequences, ROUTER_BIAS[variant])
        for variant, folder in folders.items()
        if variant in STEPPED
    }
    frozen = _step(folders["deepseek_v3"], ParallelSection(), sequences, RouterBias.FROZEN)
    return logprobs, steps, frozen


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], sequences: list[TrainingSequence]) -> Alone:
    return run_ranks(1, _alone, folders, sequences)[0]


def _pair(folders: dict[str, Path], sequences: list[TrainingSequence], out: Path) -> list[dict[str, Step]]:
    for variant, folder in folders.items():
        trainer = make_trainer(folder, ParallelSection(num_procs=2))
        hf_checkpoint.save(
            trainer.model, trainer._facts, out / variant, source=folder, max_file_bytes=MAX_FILE_BYTES
        )
    return [
        {variant: _step(folders[variant], parallel, sequences, ROUTER_BIAS[variant]) for variant in variants}
        for variants, parallel in LAYOUTS
    ]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def pair(
    folders: dict[str, Path], sequences: list[TrainingSequence], exported: Path
) -> list[list[dict[str, Step]]]:
    """By rank and layout; the models lie in ``exported`` afterwards."""
    return run_ranks(2, _pair, folders, sequences, exported)


def test_logprobs_are_those_of_transformers(
    folders: dict[str, Path], sequences: list[TrainingSequence], alone: Alone
) -> None:
    for variant, folder in folders.items():
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = []
        for sequence in sequences:
            ids, num_prompt = _ids(sequence), len(sequence.prompt_ids_P)
            with torch.no_grad():
                logprobs = torch.log_softmax(reference(ids[None]).logits[0].double(), -1)
            rows.append(logprobs[num_prompt - 1 : -1].gather(1, ids[num_prompt:, None])[:, 0])
        expected = torch.cat(rows)
        torch.testing.assert_close(alone[0][variant].double(), expected, atol=1e-4, rtol=0, msg=variant)
        assert expected.std() > 0.3, f"{variant}: a nearly uniform model would hide mistakes"


def _ids(sequence: TrainingSequence) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T])).long()


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_a_step_is_the_same_under_every_layout(
    folders: dict[str, Path], alone: Alone, pair: list[list[dict[str, Step]]], index: int
) -> None:
    for of_rank in pair:
        for variant, found in of_rank[index].items():
            expected = alone[1][variant]
            for name in ("loss", "grad_norm", "mismatch/kl"):
                assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4), (variant, name)
            assert found.weights.keys() == expected.weights.keys()
            for name, tensor in expected.weights.items():
                torch.testing.assert_close(
                    found.weights[name], tensor, atol=2e-5, rtol=1e-4, msg=f"{variant} {name}"
                )


def test_every_weight_is_trained(folders: dict[str, Path], alone: Alone) -> None:
    for variant, step in alone[1].items():
        before = load_file(folders[variant] / "model.safetensors")
        assert step.weights.keys() == before.keys()
        same = [name for name, tensor in step.weights.items() if torch.equal(tensor, before[name])]
        # An expert may have got no token.
        assert [name for name in same if ".experts." not in name] == [], variant
        assert step.metrics.get("routing/num_moe_layers") == (None if variant in ROUTED else 0.0)


def test_biases_of_routers_follow_the_load_or_stay(
    folders: dict[str, Path], sequences: list[TrainingSequence], alone: Alone
) -> None:
    """Against the choices of transformers' routers: Wang et al. (2024), algorithm 1, changes centred."""
    _, steps, frozen = alone
    before = load_file(folders["deepseek_v3"] / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folders["deepseek_v3"], dtype=torch.float32)
    facts = read_model_facts(str(folders["deepseek_v3"]))
    chosen: dict[int, list[torch.Tensor]] = {}
    for layer in range(facts.num_dense_layers, facts.num_layers):
        chosen[layer] = []
        gate = model.model.layers[layer].mlp.gate
        gate.register_forward_hook(lambda _gate, _input, output, ids=chosen[layer]: ids.append(output[2]))
    for sequence in sequences:
        with torch.no_grad():
            model(_ids(sequence)[None])
    for layer, ids in chosen.items():
        counts_E = torch.bincount(torch.cat(ids).flatten(), minlength=facts.num_experts).double()
        changes_E = SPEED * torch.sign(counts_E.mean() - counts_E)
        changes_E -= changes_E.mean()
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        torch.testing.assert_close(
            steps["deepseek_v3"].weights[name].double(), before[name].double() + changes_E, atol=1e-6, rtol=0
        )
        assert changes_E.abs().max() > 0.5 * SPEED
        assert torch.equal(frozen.weights[name], before[name])


def test_files_there_and_back_are_bit_exact(
    folders: dict[str, Path], pair: list[list[dict[str, Step]]], exported: Path
) -> None:
    for variant, source in folders.items():
        folder = exported / variant
        before = load_file(source / "model.safetensors")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        after: dict[str, torch.Tensor] = {}
        files = sorted(set(index["weight_map"].values()))
        assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert len(files) > 1 and {path.name for path in folder.glob("*.safetensors")} == set(files)
        for file in files:
            tensors = load_file(folder / file)
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= MAX_FILE_BYTES
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
        original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(original[name], tensor), (variant, name)
