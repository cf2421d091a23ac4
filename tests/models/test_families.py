"""Every model family: the trainer against transformers, and files there and back."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from forgeasync.config import ActivationCheckpointing, ParallelSection, RouterBias
from forgeasync.models import (
    CheckpointTensors,
    check_checkpoint_shapes,
    dequantized,
    read_model_facts,
    untrained_tensors,
)
from forgeasync.trainer import TrainingSequence, hf_checkpoint, pack_row
from tests.support.families import VARIANTS, load_family, write_family, write_mxfp4
from tests.support.processes import run_ranks
from tests.support.references import reference_logprobs
from tests.support.trainers import make_trainer, named_tensors, plain_sequence

MAX_FILE_BYTES = 40_000

MTP_VARIANTS = {"deepseek_v3_yarn", "glm4_moe", "glm4_moe_air"}
"""Those with layers of multi-token prediction."""

SPEED = 0.01


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {variant: write_family(root / variant, variant) for variant in VARIANTS}


@pytest.fixture(scope="module")
def sequences(folders: dict[str, Path]) -> list[TrainingSequence]:
    """The last is as long as positions go: rotary scaling shows in late ones."""
    vocab_size = read_model_facts(str(folders["llama"])).vocab_size
    rng = np.random.default_rng(0)
    lengths = [*((int(rng.integers(1, 20)), int(rng.integers(3, 60))) for _ in range(7)), (1, 127)]
    return [
        plain_sequence(
            *(rng.integers(0, vocab_size, num).astype(np.int32) for num in (num_prompt, num_response))
        )
        for num_prompt, num_response in lengths
    ]


def _logprobs(folders: dict[str, Path], sequences: list[TrainingSequence]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {name: make_trainer(folder).logprobs(pack_row(sequences)) for name, folder in folders.items()}


def test_logprobs_are_those_of_transformers(
    folders: dict[str, Path], sequences: list[TrainingSequence]
) -> None:
    found = run_ranks(1, _logprobs, folders, sequences)[0]
    for variant, folder in folders.items():
        reference = load_family(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = torch.cat([reference_logprobs(reference, sequence) for sequence in sequences])
        torch.testing.assert_close(found[variant].double(), expected, atol=1e-4, rtol=0, msg=variant)
        assert expected.std() > 0.3, f"{variant}: a nearly uniform model would hide mistakes"


def _gradients(
    folders: dict[str, Path], sequences: list[TrainingSequence]
) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, folder in folders.items():
        if "qwen3_5" in name:
            continue
        trainer = make_trainer(folder)
        (trainer.logprobs(pack_row(sequences)) * _weights(sequences)).sum().backward()
        found[name] = named_tensors(trainer, gradients=True)
    return found


def _weights(sequences: list[TrainingSequence]) -> torch.Tensor:
    """Of the log-probabilities, in the sum whose gradient is compared."""
    num_targets = sum(len(sequence.response_ids_T) for sequence in sequences)
    return torch.linspace(-1.0, 1.0, num_targets)


def test_gradients_are_those_of_transformers(
    folders: dict[str, Path], sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    """In float64 there: each tensor's error is at most 1e-4 of its largest gradient."""
    found = run_ranks(1, _gradients, folders, sequences)[0]
    for variant in found:
        reference = load_family(folders[variant], dtype=torch.float64, experts_implementation="eager")
        # Padding would have no gradient, but it is an ordinary token here.
        reference.get_input_embeddings().padding_idx = None
        logprobs = torch.cat([reference_logprobs(reference, sequence) for sequence in sequences])
        (logprobs * _weights(sequences)).sum().backward()
        for parameter in reference.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # Files have a tensor per expert.
        reference.save_pretrained(tmp_path / variant)
        expected = load_file(tmp_path / variant / "model.safetensors")
        assert found[variant].keys() == {name for name in expected if not name.endswith("correction_bias")}
        for name, gradient in found[variant].items():
            error = (gradient.double() - expected[name].double()).abs().max()
            assert error <= 1e-4 * expected[name].abs().max(), (variant, name)
            assert expected[name].any() or ".experts." in name, (variant, name)


HYBRID_VARIANTS = ("qwen3_5", "qwen3_5_moe")

CHECKPOINTING = {
    "qwen3_5": ActivationCheckpointing.SELECTIVE,
    "qwen3_5_moe": ActivationCheckpointing.FULL,
}


def _hybrid_gradients(
    folders: dict[str, Path], sequences: list[TrainingSequence]
) -> dict[str, dict[str, torch.Tensor]]:
    """Of the sum of all log-probabilities, by Hugging Face names."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for variant in HYBRID_VARIANTS:
        trainer = make_trainer(folders[variant], activation_checkpointing=CHECKPOINTING[variant])
        row = pack_row(sequences)
        trainer.logprobs(row).sum().backward()
        facts = read_model_facts(str(folders[variant]))
        found[variant] = {}
        for name, parameter in trainer.model.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            whole = parameter.grad.full_tensor()
            names = hf_checkpoint.hf_names(name, facts)
            parts = hf_checkpoint.unstack_experts(whole, name)
            found[variant] |= dict(zip(names, parts, strict=True))
    return found


def test_gradients_of_linear_attention_are_those_of_transformers(
    folders: dict[str, Path], sequences: list[TrainingSequence]
) -> None:
    found = run_ranks(1, _hybrid_gradients, folders, sequences)[0]
    for variant, gradients in found.items():
        # transformers computes linear attention in float32, and everything else in float64 here.
        reference = AutoModelForCausalLM.from_pretrained(
            folders[variant], dtype=torch.float64, experts_implementation="eager"
        )
        # Padding tokens are tokens like all others to the trainer.
        reference.get_input_embeddings().padding_idx = None
        torch.stack([reference_logprobs(reference, one).sum() for one in sequences]).sum().backward()
        wanted = {}
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None, name
            if name.endswith("experts.gate_up_proj"):
                for index, pair in enumerate(parameter.grad):
                    for side, part in zip(("gate", "up"), pair.chunk(2), strict=True):
                        wanted[name.replace("gate_up_proj", f"{index}.{side}_proj.weight")] = part
            elif name.endswith("experts.down_proj"):
                for index, part in enumerate(parameter.grad):
                    wanted[name.replace("down_proj", f"{index}.down_proj.weight")] = part
            else:
                wanted[name] = parameter.grad
        assert wanted.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert wanted[name].norm() > 0, name
            error = float((gradient.double() - wanted[name]).norm() / wanted[name].norm())
            assert error < 5e-4, (variant, name, error)


def _biases(folder: Path, sequences: list[TrainingSequence]) -> dict[RouterBias, dict[str, torch.Tensor]]:
    """The weights after a step under each rule."""
    found = {}
    for rule in RouterBias:
        trainer = make_trainer(folder, router_bias=rule, router_bias_speed=SPEED, tokens_per_row=512)
        trainer.train_step([pack_row(sequences)])
        found[rule] = named_tensors(trainer)
    return found


def test_biases_of_routers_follow_the_load_or_stay(
    folders: dict[str, Path], sequences: list[TrainingSequence]
) -> None:
    """Against the choices of transformers' routers: Wang et al. (2024), algorithm 1, changes centred."""
    found = run_ranks(1, _biases, folders["deepseek_v3"], sequences)[0]
    before = load_file(folders["deepseek_v3"] / "model.safetensors")
    model = load_family(folders["deepseek_v3"], dtype=torch.float32)
    facts = read_model_facts(str(folders["deepseek_v3"]))
    chosen: dict[int, list[torch.Tensor]] = {}
    for layer in range(facts.num_dense_layers, facts.num_layers):
        chosen[layer] = []
        gate = model.model.layers[layer].mlp.gate
        gate.register_forward_hook(lambda _gate, _input, output, ids=chosen[layer]: ids.append(output[2]))
    with torch.no_grad():
        for sequence in sequences:
            reference_logprobs(model, sequence)
    for layer, ids in chosen.items():
        counts_E = torch.bincount(torch.cat(ids).flatten(), minlength=facts.num_experts).double()
        changes_E = SPEED * torch.sign(counts_E.mean() - counts_E)
        changes_E -= changes_E.mean()
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        updated_E = found[RouterBias.UPDATED][name].double()
        torch.testing.assert_close(updated_E, before[name].double() + changes_E, atol=1e-6, rtol=0)
        assert changes_E.abs().max() > 0.5 * SPEED
        assert torch.equal(found[RouterBias.FROZEN][name], before[name])


def stack_experts(folder: Path, target: Path) -> None:
    """Copy a folder with the experts of a layer in two tensors, as Qwen3.5 is published."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    stacked: dict[str, torch.Tensor] = {}
    for name in list(tensors):
        module, _, own = name.partition(".experts.")
        if own == "0.gate_proj.weight":
            num = sum(one.startswith(f"{module}.experts.") for one in tensors) // 3
            sides = {
                side: torch.stack([tensors.pop(f"{module}.experts.{e}.{side}.weight") for e in range(num)])
                for side in ("gate_proj", "up_proj", "down_proj")
            }
            stacked[f"{module}.experts.gate_up_proj"] = torch.cat([sides["gate_proj"], sides["up_proj"]], 1)
            stacked[f"{module}.experts.down_proj"] = sides["down_proj"]
    save_file(tensors | stacked, target / "model.safetensors", metadata={"format": "pt"})


def test_stacked_experts_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["qwen3_5_moe_vision"]
    stack_experts(source, tmp_path / "stacked")
    facts = read_model_facts(str(source))
    assert check_checkpoint_shapes(tmp_path / "stacked", facts) == []
    run_ranks(2, _save, {"qwen3_5_moe_vision": tmp_path / "stacked"}, tmp_path)
    before, after = load_file(source / "model.safetensors"), dict[str, torch.Tensor]()
    for file in (tmp_path / "qwen3_5_moe_vision").glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    wrong = dataclasses.replace(facts, expert_hidden_size=facts.expert_hidden_size + 1)
    assert "experts.0.gate_proj.weight" in str(check_checkpoint_shapes(tmp_path / "stacked", wrong)[0])


def _logprobs_and_save(folder: Path, sequences: list[TrainingSequence], out: Path) -> torch.Tensor:
    _save({"mxfp4": folder}, out)
    with torch.no_grad():
        return make_trainer(folder, ParallelSection(num_procs=2)).logprobs(pack_row(sequences))


def test_mxfp4_has_the_bits_of_transformers(tmp_path: Path) -> None:
    """Every scale and byte; whole stacks and parts of them."""
    scales = torch.arange(256, dtype=torch.uint8).view(2, 16, 8)
    blocks = torch.randint(256, (2, 16, 8, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    expected = convert_moe_packed_tensors(blocks, scales).contiguous()
    tensors = CheckpointTensors(tmp_path)
    part = tensors.part("x", (1, 21, 5), (1, 40, 9)).contiguous()
    pairs = [
        (tensors["x"].contiguous(), expected),
        (part, expected[1:, 21:61, 5:14].contiguous()),
        (dict(dequantized([("x_scales", scales), ("x_blocks", blocks)]))["x"].contiguous(), expected),
    ]
    assert all(torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in pairs)
    assert list(tensors) == ["x"] and tensors.shape("x") == (2, 256, 16) and "x" in tensors


def test_experts_in_mxfp4_are_trained_and_written_in_bfloat16(
    sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    folder = write_mxfp4(tmp_path / "model", "gpt_oss")
    facts = read_model_facts(str(folder))
    assert check_checkpoint_shapes(folder, facts) == []
    (found, _) = run_ranks(2, _logprobs_and_save, folder, sequences, tmp_path)
    before, after = dict(dequantized(load_file(folder / "model.safetensors").items())), {}
    for file in (tmp_path / "mxfp4").glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    model = load_family(tmp_path / "mxfp4", dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat([reference_logprobs(model, sequence) for sequence in sequences])
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)


def test_experts_in_mxfp4_without_their_scales_are_refused(tmp_path: Path) -> None:
    folder = write_mxfp4(tmp_path / "model", "gpt_oss")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    problems = map(str, check_checkpoint_shapes(folder, read_model_facts(str(folder))))
    assert "lacks tensor model.layers.0.mlp.experts.down_proj of shape" in next(problems)


def _save(folders: dict[str, Path], out: Path) -> None:
    for variant, folder in folders.items():
        expert = 2 if read_model_facts(str(folder)).num_experts else 1
        trainer = make_trainer(folder, ParallelSection(num_procs=2, expert=expert))
        hf_checkpoint.save(
            trainer.model, trainer._facts, out / variant, source=folder, max_file_bytes=MAX_FILE_BYTES
        )


def test_files_there_and_back_are_bit_exact(folders: dict[str, Path], tmp_path: Path) -> None:
    for source in folders.values():
        # What loads a model with a vision tower needs it.
        (source / "preprocessor_config.json").write_text('{"patch_size": 16}')
    # As in files of Llama 2.
    file = folders["llama"] / "model.safetensors"
    frequencies = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.rand(16)}
    save_file(load_file(file) | frequencies, file, metadata={"format": "pt"})
    run_ranks(2, _save, folders, tmp_path)
    for variant, source in folders.items():
        folder = tmp_path / variant
        before = load_file(source / "model.safetensors")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        after: dict[str, torch.Tensor] = {}
        files = sorted(set(index["weight_map"].values()))
        assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert len(files) > 1 and {path.name for path in folder.glob("*.safetensors")} == set(files)
        modes = {path.stat().st_mode for path in folder.glob("model*")}
        assert len(modes) == 1, "whoever may read one file may read all"
        for file in files:
            tensors = load_file(folder / file)
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= MAX_FILE_BYTES
            assert all(index["weight_map"][name] == file for name in tensors)
            after |= tensors
        assert before.keys() == after.keys(), variant
        assert all(torch.equal(before[name], after[name]) for name in before), variant
        assert all(before[name].dtype == after[name].dtype for name in before), variant
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
        assert check_checkpoint_shapes(folder, read_model_facts(str(folder))) == []
        for file in ("config.json", "tokenizer.json", "generation_config.json", "preprocessor_config.json"):
            assert (folder / file).read_text() == (source / file).read_text()
        loaded, report = load_family(folder, dtype=torch.float32, output_loading_info=True)
        untrained = set(untrained_tensors(folder, read_model_facts(str(folder)))) - frequencies.keys()
        assert bool(untrained) == (variant in MTP_VARIANTS or "vision" in variant)
        layers = {name.split(".")[2] for name in untrained if not name.startswith("model.visual.")}
        assert {name.split(".")[2] for name in report["unexpected_keys"]} == layers, variant
        assert not report["missing_keys"], variant
        original = load_family(source, dtype=torch.float32).state_dict()
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(original[name], tensor), (variant, name)
