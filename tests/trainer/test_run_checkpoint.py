"""Checkpoints of the trainer: what is in them, under which layouts they are read, and when one is whole."""

import dataclasses
import os
import pickle
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from forgeasync.checkpoints import (
    archive_bytes,
    check_room,
    checkpoint_bytes,
    checkpoint_name,
    export_bytes,
    list_checkpoints,
    sweep_partial,
)
from forgeasync.config import (
    CheckpointSection,
    Delta,
    LoraSection,
    OptimizerSection,
    ParallelSection,
    WeightsSection,
)
from forgeasync.models import read_model_facts, version_bytes
from forgeasync.testing import tiny_config, write_tiny_model
from forgeasync.trainer import (
    CheckpointWriter,
    PolicyTrainer,
    TrainingSequence,
    pack_row,
    pack_rows,
)
from tests.support.processes import ProcessFailed, run_ranks
from tests.support.trainers import TOKENS_PER_ROW, make_sequences, make_trainer, named_tensors

SINGLE = ParallelSection()
LORA = LoraSection(rank=3, alpha=6.0, targets=("q_proj", "down_proj"))
METRICS = ("loss", "grad_norm", "learning_rate")
NUM_STEPS, NUM_BEFORE = 4, 2

Weights = dict[str, torch.Tensor]
Steps = list[dict[str, float]]


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return folder


@pytest.fixture(scope="module")
def sequences(folder: Path) -> list[TrainingSequence]:
    return make_sequences(8, read_model_facts(str(folder)))


def probing_trainer(model: Path, parallel: ParallelSection, **options: Any) -> PolicyTrainer:
    """It probes on every second row or so: their turn is part of what is resumed, and so is the average."""
    optimizer = OptimizerSection(learning_rate=1e-2, warmup_steps=10, max_grad_norm=0.1, eps=1e-3)
    options = {"replay_probe_share": 0.4, "average_alpha": 0.9, "optimizer": optimizer} | options
    return make_trainer(model, parallel, **options)


def step(trainer: PolicyTrainer, sequences: list[TrainingSequence]) -> dict[str, float]:
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
    metrics = trainer.train_step([*rows[trainer.data_rank], pack_row([])]).metrics
    return {name: metrics[name] for name in METRICS if name in metrics} | {
        name: value for name, value in metrics.items() if name.startswith("mismatch/with")
    }


def _save_in_mid_run(
    model: Path,
    parallel: ParallelSection,
    sequences: list[TrainingSequence],
    parent: Path,
    lora: LoraSection | None,
) -> tuple[Steps, Weights]:
    """Four steps, with a checkpoint begun after the second: the others run beside its writing."""
    trainer = probing_trainer(model, parallel, lora=lora)
    steps = []
    for number in range(1, NUM_STEPS + 1):
        steps.append(step(trainer, sequences))
        if number == NUM_BEFORE:
            folder = parent / checkpoint_name(number)
            trainer.begin_checkpoint(folder, run_state=b"{}", keep=1)
    weights = named_tensors(trainer)
    trainer.finish_checkpoint()
    return steps[NUM_BEFORE:], weights


def _resume(
    model: Path,
    parallel: ParallelSection,
    sequences: list[TrainingSequence],
    parent: Path,
    lora: LoraSection | None,
) -> tuple[Steps, Weights]:
    trainer = probing_trainer(model, parallel, lora=lora)
    (folder,) = list_checkpoints(parent)
    torch.manual_seed(99)
    trainer.resume(folder)
    assert trainer.policy_version == NUM_BEFORE
    steps = [step(trainer, sequences) for _ in range(NUM_STEPS - NUM_BEFORE)]
    assert trainer.policy_version == NUM_STEPS
    return steps, named_tensors(trainer)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_resumed_training_is_the_same_to_the_last_bit(
    model: Path, sequences: list[TrainingSequence], tmp_path: Path, lora: LoraSection | None
) -> None:
    steps, weights = run_ranks(1, _save_in_mid_run, model, SINGLE, sequences, tmp_path, lora)[0]
    resumed_steps, resumed_weights = run_ranks(1, _resume, model, SINGLE, sequences, tmp_path, lora)[0]
    assert resumed_steps == steps and any(len(one) > len(METRICS) for one in steps)
    assert resumed_weights.keys() == weights.keys()
    assert all(torch.equal(resumed_weights[name], weights[name]) for name in weights)


LAYOUTS = {
    "single": SINGLE,
    "fsdp2": ParallelSection(num_procs=2),
    "fsdp2-ep2": ParallelSection(num_procs=2, expert=2),
    "tp2": ParallelSection(num_procs=2, tensor=2, sequence=False),
    "tp2-ep2": ParallelSection(num_procs=2, tensor=2, expert=2),
}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp2-ep2", "tp2-ep2"),
        pytest.param("tp2", "single", marks=pytest.mark.exhaustive),
        pytest.param("single", "fsdp2", marks=pytest.mark.exhaustive),
    ],
)
def test_resumed_under_another_layout(
    model: Path, sequences: list[TrainingSequence], tmp_path: Path, before: str, after: str
) -> None:
    one, other = LAYOUTS[before], LAYOUTS[after]
    steps, weights = run_ranks(one.num_procs, _save_in_mid_run, model, one, sequences, tmp_path, None)[0]
    resumed_steps, resumed_weights = run_ranks(
        other.num_procs, _resume, model, other, sequences, tmp_path, None
    )[0]
    for resumed, expected in zip(resumed_steps, steps, strict=True):
        for name in METRICS:
            assert resumed[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    for name, expected in weights.items():
        torch.testing.assert_close(resumed_weights[name], expected, atol=1e-5, rtol=1e-5, msg=name)


class DyingWriter(FileSystemWriter):
    """Is killed when it has written its data."""

    def write_data(self, plan: object, planner: object) -> object:
        super().write_data(plan, planner).wait()
        os.kill(os.getpid(), signal.SIGKILL)


def _write_and_die(model: Path, parent: Path) -> None:
    trainer = probing_trainer(model, SINGLE)
    trainer.state.policy_version = 1
    trainer.begin_checkpoint(parent / checkpoint_name(1), run_state=b"{}", keep=1)
    trainer.finish_checkpoint()
    trainer._checkpoints = CheckpointWriter(DyingWriter)
    trainer.state.policy_version = 2
    trainer.begin_checkpoint(parent / checkpoint_name(2), run_state=b"{}", keep=1)
    trainer.finish_checkpoint()


def _version(model: Path, folder: Path) -> int:
    trainer = probing_trainer(model, SINGLE)
    trainer.resume(folder)
    return trainer.policy_version


def test_a_kill_in_mid_write_leaves_the_checkpoint_before(model: Path, tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    parent.mkdir()
    partial = parent / "step-00000002.tmp"
    with pytest.raises(ProcessFailed, match="killed by signal 9"):
        run_ranks(1, _write_and_die, model, parent)
    assert any((partial / "trainer").iterdir())
    assert [folder.name for folder in list_checkpoints(parent)] == ["step-00000001"]
    assert sweep_partial(parent) == ["step-00000002.tmp"] and not partial.exists()
    assert sweep_partial(parent) == []
    assert run_ranks(1, _version, model, parent / "step-00000001") == [1]


def _keep_and_refuse(model: Path, other: Path, parent: Path) -> None:
    trainer = probing_trainer(model, SINGLE)
    for version in (1, 2, 3, 4):
        trainer.state.policy_version = version
        trainer.begin_checkpoint(parent / checkpoint_name(version), run_state=b"{}", keep=2)
    trainer.finish_checkpoint()
    assert [path.name for path in sorted(list_checkpoints(parent))] == ["step-00000003", "step-00000004"]
    folder = parent / checkpoint_name(3)
    trainer.resume(folder)
    assert trainer.policy_version == 3
    for stranger, words in (
        (probing_trainer(other, SINGLE), rf"{parent}.*has shape \(8, 64.*\(4, 64"),
        (probing_trainer(model, SINGLE, lora=LORA), "no such tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            stranger.resume(folder)
    # A file in the way, as a full disk would be.
    (parent / "step-00000005.tmp").write_text("")
    trainer.begin_checkpoint(parent / checkpoint_name(5), run_state=b"{}", keep=2)
    with pytest.raises(OSError, match=r"step-00000005 could not be written.*Not a directory"):
        trainer.finish_checkpoint()
    assert len(list_checkpoints(parent)) == 2


def test_the_newest_are_kept_and_strangers_refused(model: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", num_experts=4)
    run_ranks(1, _keep_and_refuse, model, other, tmp_path / "checkpoints")


def test_room_for_a_checkpoint_is_computed_and_asked_for(model: Path, tmp_path: Path) -> None:
    facts = read_model_facts(str(model))
    config = tiny_config(model).model_copy(update={"checkpoint": CheckpointSection(every_steps=1)})
    run_ranks(1, _write_one, model, tmp_path)
    (folder,) = list_checkpoints(tmp_path)
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert written <= checkpoint_bytes(config, facts) < 1.5 * written
    assert list(check_room(config, facts, checkpoints=tmp_path / "not" / "yet", export=tmp_path)) == []
    # A model that no disk holds, with 2 * 64 * 10**12 parameters in embedding and head.
    large = dataclasses.replace(facts, vocab_size=10**12)
    folders = {"checkpoints": tmp_path / "new", "export": tmp_path / "new"}
    for every_steps, words in (
        # Of three steps with keep = 2 there are three for a moment, on the one disk with the export.
        (1, " and 3 checkpoints 4.29e+06 GiB"),
        # The last of the three steps has one too.
        (2, " and 2 checkpoints 2.86e+06 GiB"),
        (None, ", and"),
    ):
        section = CheckpointSection(every_steps=every_steps)
        (problem,) = check_room(config.model_copy(update={"checkpoint": section}), large, **folders)
        assert problem.field == "run_dir" and "GiB free" in problem.remedy
        assert f"takes 4.77e+05 GiB{words}" in problem.remedy


def test_room_for_whole_versions_of_the_archive(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = read_model_facts(str(model))
    config = tiny_config(model).model_copy(
        update={"weights": WeightsSection(archive=True, delta=Delta.EXACT)}
    )
    one = version_bytes(config, facts)
    # Files begin with versions 1, 2, 4 and so on; the fourth is begun before the first one is removed.
    for every_steps, max_steps, num_files in ((1, 3, 3), (2, 3, 2), (2, 100, 4), (None, 3, 1)):
        section = CheckpointSection(every_steps=every_steps)
        kept = config.model_copy(update={"checkpoint": section, "max_steps": max_steps})
        assert archive_bytes(kept, facts, tmp_path) == num_files * one
    (tmp_path / "00000001-rank-0.weights").write_bytes(bytes(one // 2))
    assert archive_bytes(kept, facts, tmp_path) == one - one // 2
    enough = export_bytes(kept, facts) + one
    for free in (enough, enough - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        problems = list(check_room(kept, facts, checkpoints=tmp_path, export=tmp_path / "checkpoints"))
        assert len(problems) == (free < enough)
    assert " GiB, whole versions of weights.archive " in problems[0].remedy


def test_the_room_for_an_export_is_what_it_takes(model: Path) -> None:
    facts = read_model_facts(str(model))
    config = tiny_config(model)
    written = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert written <= export_bytes(config, facts) < 1.5 * written
    adapted = config.model_copy(update={"lora": LORA})
    # down_proj brings the other projections of experts along, as zeros.
    named = LORA.model_copy(update={"targets": ("q_proj", "gate_proj", "up_proj", "down_proj")})
    assert export_bytes(adapted, facts) == export_bytes(adapted.model_copy(update={"lora": named}), facts)
    assert export_bytes(adapted, facts) < export_bytes(config, facts)


def test_room_on_two_disks(model: Path, tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    if shared_memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one disk only")
    facts = dataclasses.replace(read_model_facts(str(model)), vocab_size=10**12)
    config = tiny_config(model).model_copy(update={"checkpoint": CheckpointSection(every_steps=1)})
    problems = list(check_room(config, facts, checkpoints=shared_memory / "x", export=tmp_path))
    assert [problem.field for problem in problems] == ["run_dir", "checkpoint.folder"]
    assert "checkpoints" not in problems[0].remedy.partition(", and")[0]


def _write_one(model: Path, parent: Path) -> None:
    trainer = probing_trainer(model, SINGLE, average_alpha=None)
    trainer.begin_checkpoint(parent / checkpoint_name(1), run_state=b"{}", keep=1)
    trainer.finish_checkpoint()


class _Writes:
    """Pickled, a call that writes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.open, (str(self._file), os.O_CREAT)


def _resume_all(model: Path, folders: list[Path]) -> list[str]:
    messages = []
    for folder in folders:
        with pytest.raises(ValueError) as caught:
            probing_trainer(model, SINGLE, average_alpha=None).resume(folder)
        messages.append(str(caught.value))
    return messages


def test_a_checkpoint_that_would_run_code_is_refused_and_runs_nothing(model: Path, tmp_path: Path) -> None:
    run_ranks(1, _write_one, model, tmp_path / "own")
    (own,) = list_checkpoints(tmp_path / "own")
    written = (own / "trainer" / ".metadata").read_bytes()
    metadata = pickle.loads(written)
    hidden = tmp_path / "hidden"
    metadata.planner_data = _Writes(hidden)
    contents = {
        "at the top": pickle.dumps(_Writes(hidden)),
        "within": pickle.dumps(metadata),
        "by a dotted name": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x04true\x85R.",
        "cut": written[: len(written) // 2],
        "no metadata": pickle.dumps([1]),
    }
    folders = []
    for name, content in contents.items():
        folders.append(tmp_path / "foreign" / name)
        shutil.copytree(own, folders[-1])
        (folders[-1] / "trainer" / ".metadata").write_bytes(content)
    messages = run_ranks(1, _resume_all, model, folders)[0]
    assert not hidden.exists()
    expected = ["posix.open", "posix.open", "torch.os.system", "is damaged", "holds a list"]
    for folder, message, part in zip(folders, messages, expected, strict=True):
        assert part in message and str(folder / "trainer" / ".metadata") in message, message
    assert "none of it was run" in messages[0]
