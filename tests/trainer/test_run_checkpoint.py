"""Checkpoints of the trainer: what is in them, under which layouts they are read, and when one is whole."""

import dataclasses
import os
import pickle
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from forgeasync.checkpoints import (
    check_room,
    checkpoint_bytes,
    checkpoint_name,
    export_bytes,
    list_checkpoints,
    sweep_partial,
)
from forgeasync.config import CheckpointSection, LoraSection, OptimizerSection, ParallelSection
from forgeasync.models import read_model_facts
from forgeasync.testing import tiny_config, write_tiny_model
from forgeasync.trainer import (
    CheckpointWriter,
    PolicyTrainer,
    TrainingSequence,
    adapter_parameters,
    full_tensors,
    pack_row,
    pack_rows,
)
from tests.support.processes import ProcessFailed, run_ranks
from tests.support.trainers import TOKENS_PER_ROW, make_sequences, make_trainer, whole

SINGLE = ParallelSection()
LORA = LoraSection(rank=3, alpha=6.0, targets=("q_proj", "down_proj"))
METRICS = ("loss", "grad_norm", "learning_rate")
NUM_STEPS, NUM_BEFORE = 4, 2

Run = tuple[list[dict[str, float]], dict[str, torch.Tensor]]
"""Metrics of the last steps, and the weights after them."""


def probing_trainer(model: Path, parallel: ParallelSection, **options: Any) -> PolicyTrainer:
    """It probes on every second row or so: their turn is part of what is resumed."""
    optimizer = OptimizerSection(learning_rate=1e-2, warmup_steps=10, max_grad_norm=0.1, eps=1e-3)
    return make_trainer(model, parallel, replay_probe_share=0.4, optimizer=optimizer, **options)


def step(trainer: PolicyTrainer, sequences: list[TrainingSequence]) -> dict[str, float]:
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
    metrics = trainer.train_step([*rows[trainer.data_rank], pack_row([])]).metrics
    return {name: metrics[name] for name in METRICS if name in metrics} | {
        name: value for name, value in metrics.items() if name.startswith("mismatch/with")
    }


def write(trainer: PolicyTrainer, parent: Path, version: int, *, keep: int = 1) -> Path:
    """Begin the checkpoint of a version."""
    trainer.state.policy_version = version
    folder = parent / checkpoint_name(version)
    trainer.begin_checkpoint(folder, run_state=b"{}", keep=keep)
    return folder


def weights_of(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    if trainer._lora is None:
        return {name: tensor.clone() for name, tensor in full_tensors(trainer.model, trainer._facts)}
    return {name: whole(p) for name, p in adapter_parameters(trainer.model)}


def _save_in_mid_run(
    model: Path,
    sequences: list[TrainingSequence],
    parent: Path,
    parallel: ParallelSection,
    lora: LoraSection | None,
) -> Run:
    """Four steps, with a checkpoint begun after the second: the others run beside its writing."""
    trainer = probing_trainer(model, parallel, lora=lora)
    steps = []
    for number in range(1, NUM_STEPS + 1):
        steps.append(step(trainer, sequences))
        if number == NUM_BEFORE:
            write(trainer, parent, number)
    weights = weights_of(trainer)
    trainer.finish_checkpoint()
    return steps[NUM_BEFORE:], weights


def _resume(
    model: Path,
    sequences: list[TrainingSequence],
    parent: Path,
    parallel: ParallelSection,
    lora: LoraSection | None,
) -> Run:
    trainer = probing_trainer(model, parallel, lora=lora)
    (folder,) = list_checkpoints(parent)
    torch.manual_seed(99)
    trainer.resume(folder)
    assert trainer.policy_version == NUM_BEFORE
    steps = [step(trainer, sequences) for _ in range(NUM_STEPS - NUM_BEFORE)]
    assert trainer.policy_version == NUM_STEPS
    return steps, weights_of(trainer)


LAYOUTS = {
    "single": SINGLE,
    "fsdp2": ParallelSection(num_procs=2),
    "fsdp2-ep2": ParallelSection(num_procs=2, expert=2),
    "tp2": ParallelSection(num_procs=2, tensor=2, sequence=False),
    "tp2-ep2": ParallelSection(num_procs=2, tensor=2, expert=2),
}


@pytest.mark.parametrize(
    ("before", "after", "lora"),
    [
        ("single", "single", None),
        ("single", "single", LORA),
        ("fsdp2-ep2", "tp2-ep2", None),
        pytest.param("tp2", "single", None, marks=pytest.mark.exhaustive),
        pytest.param("single", "fsdp2", None, marks=pytest.mark.exhaustive),
    ],
)
def test_resumed_training_is_the_same(
    folder: Path, tmp_path: Path, before: str, after: str, lora: LoraSection | None
) -> None:
    """To the last bit, or under another layout nearly so."""
    sequences = make_sequences(8, read_model_facts(str(folder)))
    (steps, weights), (resumed_steps, resumed_weights) = (
        run_ranks(layout.num_procs, act, folder, sequences, tmp_path, layout, lora)[0]
        for act, layout in ((_save_in_mid_run, LAYOUTS[before]), (_resume, LAYOUTS[after]))
    )
    assert resumed_weights.keys() == weights.keys()
    if before == after:
        assert resumed_steps == steps and any(len(one) > len(METRICS) for one in steps)
    for resumed, expected in zip(resumed_steps, steps, strict=True):
        for name in METRICS:
            assert resumed[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    tolerance = 0.0 if before == after else 1e-5
    for name, expected in weights.items():
        torch.testing.assert_close(resumed_weights[name], expected, atol=tolerance, rtol=tolerance, msg=name)


class DyingWriter(FileSystemWriter):
    """Is killed when it has written its data."""

    def write_data(self, plan: object, planner: object) -> object:
        super().write_data(plan, planner).wait()
        os.kill(os.getpid(), signal.SIGKILL)


def _write_and_die(model: Path, parent: Path) -> None:
    trainer = probing_trainer(model, SINGLE)
    write(trainer, parent, 1)
    trainer.finish_checkpoint()
    trainer._checkpoints = CheckpointWriter(DyingWriter)
    write(trainer, parent, 2)
    trainer.finish_checkpoint()


def _version(model: Path, folder: Path) -> int:
    trainer = probing_trainer(model, SINGLE)
    trainer.resume(folder)
    return trainer.policy_version


def test_a_kill_in_mid_write_leaves_the_checkpoint_before(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="killed by signal 9"):
        run_ranks(1, _write_and_die, folder, tmp_path)
    partial = tmp_path / "step-00000002.tmp"
    assert any((partial / "trainer").iterdir())
    assert [one.name for one in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert sweep_partial(tmp_path) == ["step-00000002.tmp"] and not partial.exists()
    assert sweep_partial(tmp_path) == []
    assert run_ranks(1, _version, folder, tmp_path / "step-00000001") == [1]


def _keep_and_refuse(model: Path, other: Path, parent: Path) -> None:
    """Four checkpoints of which two are kept; what reading one gives, and what those say that cannot."""
    trainer = probing_trainer(model, SINGLE)
    for version in (1, 2, 3, 4):
        write(trainer, parent, version, keep=2)
    trainer.finish_checkpoint()
    folders = list_checkpoints(parent)
    assert sorted(folder.name for folder in folders) == ["step-00000003", "step-00000004"]
    folder = parent / checkpoint_name(3)
    trainer.resume(folder)
    assert trainer.policy_version == 3
    with pytest.raises(ValueError, match=rf"{parent}.* has shape \(8, 64.*\(4, 64"):
        probing_trainer(other, SINGLE).resume(folder)
    with pytest.raises(ValueError, match="no such tensor"):
        probing_trainer(model, SINGLE, lora=LORA).resume(folder)
    # A file in the way, as a full disk would be.
    (parent / "step-00000005.tmp").write_text("")
    write(trainer, parent, 5, keep=2)
    with pytest.raises(OSError, match=r"step-00000005 could not be written.*Not a directory"):
        trainer.finish_checkpoint()


def test_the_newest_are_kept_and_strangers_refused(folder: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", num_experts=4)
    run_ranks(1, _keep_and_refuse, folder, other, tmp_path / "checkpoints")


LARGE = 10**12
"""Tokens of a vocabulary that no disk holds, with 2 * 64 times as many parameters in embedding and head."""


def test_room_for_a_checkpoint_is_computed_and_asked_for(folder: Path, tmp_path: Path) -> None:
    facts, config = read_model_facts(str(folder)), tiny_config(folder)
    run_ranks(1, _write_one, folder, tmp_path)
    (written,) = list_checkpoints(tmp_path)
    num_bytes = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
    assert num_bytes <= checkpoint_bytes(config, facts) < 1.5 * num_bytes
    assert list(check_room(config, facts, checkpoints=tmp_path / "not" / "yet", export=tmp_path)) == []
    large = dataclasses.replace(facts, vocab_size=LARGE)
    folders = {"checkpoints": tmp_path / "new", "export": tmp_path / "new"}
    for every_steps, takes in (
        # Of three steps with keep = 2 there are three for a moment, on the disk of the export.
        (1, "takes 4.77e+05 GiB and 3 checkpoints 4.29e+06 GiB"),
        # With one every two steps, the last of the three steps has one too.
        (2, "takes 4.77e+05 GiB and 2 checkpoints 2.86e+06 GiB"),
        (None, "takes 4.77e+05 GiB, and"),
    ):
        changed = config.model_copy(update={"checkpoint": CheckpointSection(every_steps=every_steps)})
        (problem,) = check_room(changed, large, **folders)
        assert problem.field == "run_dir" and "GiB free" in problem.remedy and takes in problem.remedy


def test_the_room_for_an_export_is_what_it_takes(folder: Path) -> None:
    facts, config = read_model_facts(str(folder)), tiny_config(folder)
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert written <= export_bytes(config, facts) < 1.5 * written
    # down_proj brings the other projections of experts along, as zeros.
    named = LORA.model_copy(update={"targets": ("q_proj", "gate_proj", "up_proj", "down_proj")})
    of_some, of_named = (
        export_bytes(config.model_copy(update={"lora": lora}), facts) for lora in (LORA, named)
    )
    assert of_some == of_named < export_bytes(config, facts)


def test_room_on_two_disks(folder: Path, tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    if shared_memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one disk only")
    facts = dataclasses.replace(read_model_facts(str(folder)), vocab_size=LARGE)
    config = tiny_config(folder).model_copy(update={"checkpoint": CheckpointSection(every_steps=1)})
    problems = list(check_room(config, facts, checkpoints=shared_memory / "x", export=tmp_path))
    assert [problem.field for problem in problems] == ["run_dir", "checkpoint.folder"]
    assert "checkpoints" not in problems[0].remedy.partition(", and")[0]


def _write_one(model: Path, parent: Path) -> None:
    trainer = probing_trainer(model, SINGLE)
    write(trainer, parent, 1)
    trainer.finish_checkpoint()


class _Writes:
    """Pickled, a call that writes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.open, (str(self._file), os.O_CREAT)


def _refuse_all(model: Path, refused: dict[Path, str]) -> None:
    for folder, part in refused.items():
        with pytest.raises(ValueError, match=re.escape(str(folder / "trainer" / ".metadata"))) as caught:
            probing_trainer(model, SINGLE).resume(folder)
        assert part in str(caught.value)


def test_a_checkpoint_that_would_run_code_is_refused_and_runs_nothing(folder: Path, tmp_path: Path) -> None:
    run_ranks(1, _write_one, folder, tmp_path / "own")
    (own,) = list_checkpoints(tmp_path / "own")
    written = (own / "trainer" / ".metadata").read_bytes()
    metadata, hidden = pickle.loads(written), tmp_path / "hidden"
    metadata.planner_data = _Writes(hidden)
    refused = {}
    for name, content, part in (
        ("at the top", pickle.dumps(_Writes(hidden)), "nothing of it was run"),
        ("within", pickle.dumps(metadata), "posix.open"),
        (
            "by a dotted name",
            b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x04true\x85R.",
            "torch.os.system",
        ),
        ("cut", written[: len(written) // 2], "is damaged"),
        ("no metadata", pickle.dumps([1]), "holds a list"),
    ):
        foreign = tmp_path / "foreign" / name
        shutil.copytree(own, foreign)
        (foreign / "trainer" / ".metadata").write_bytes(content)
        refused[foreign] = part
    run_ranks(1, _refuse_all, folder, refused)
    assert not hidden.exists()
