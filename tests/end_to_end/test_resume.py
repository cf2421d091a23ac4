"""Interrupted and resumed as a user does it: the command, with real processes, against a run left alone."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeasync.config import dump_config
from forgeasync.controller import open_files
from forgeasync.controller.resume import _changes
from forgeasync.observability import check_run_dir
from forgeasync.schema import ConfigError
from forgeasync.testing import tiny_config
from tests.support.app_runs import (
    check_ledger,
    controller_of,
    finish_well,
    own_lines,
    pid_of,
    read_lines,
    run_here,
    start,
    wait_for_step,
    write_tiny_run,
)

NUM_STEPS, EVERY = 5, 2
SAME = (
    "loss",
    "grad_norm",
    "reward/mean",
    "response/length_mean",
    "mismatch/logprob_abs_mean",
    "learning_rate",
)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(
        tmp_path_factory.mktemp("resume"),
        f"max_steps={NUM_STEPS}",
        "generator.batch_invariant=true",
        f"checkpoint={{every_steps: {EVERY}, keep: 3}}",
        scale=4.0,
    )


@pytest.fixture(scope="module")
def whole_run(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finish_well(start(config_file, f"run_dir={run_dir}"))
    steps = ["step-00000002", "step-00000004", "step-00000005"]
    assert names(run_dir / "checkpoints") == ["final", *steps], "every other step, and the last one"
    return run_dir


@pytest.fixture
def interrupted(whole_run: Path, tmp_path: Path) -> Iterator[Path]:
    """The run as it was killed after step 5, in the middle of writing a checkpoint, with step 2's whole."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole_run, run_dir)
    (run_dir / "checkpoints" / "final").rename(run_dir / "checkpoints" / "last")
    whole = run_dir / "checkpoints" / "step-00000004"
    whole.rename(whole.with_name(whole.name + ".tmp"))
    shutil.rmtree(run_dir / "checkpoints" / "step-00000005")
    ledger = run_dir / "ledger.jsonl"
    *lines, _ended = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines) + b'{"n":')
    yield run_dir


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.exhaustive
def test_a_resumed_run_has_the_same_losses(config_file: Path, whole_run: Path, interrupted: Path) -> None:
    out = finish_well(start(config_file, f"run_dir={interrupted}", "--resume", "latest"))
    assert "removed 1 unfinished checkpoints: step-00000004.tmp" in out
    assert "3 lines of metrics.jsonl after step 2 moved to metrics.cut-1.jsonl" in out
    assert "5 bytes of an unfinished last line of ledger.jsonl removed" in out
    expected, lines = read_lines(whole_run / "metrics.jsonl"), read_lines(interrupted / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["policy_version"] for line in lines] == [0, 1, 2, 3, 4, 5]
    for line, whole in zip(lines[3:], expected[3:], strict=True):
        assert {key: line[key] for key in SAME} == {key: whole[key] for key in SAME}
        assert line["off_policy/age_max"] == 0
    assert len({line["mismatch/logprob_abs_mean"] for line in lines[1:]}) == NUM_STEPS, (
        "steps that could not differ"
    )
    assert any(line["loss"] for line in lines[3:])
    elapsed = [line["time/elapsed_s"] for line in lines]
    assert elapsed == sorted(elapsed)
    side = read_lines(interrupted / "metrics.cut-1.jsonl")
    assert [line["step"] for line in side] == [3, 4, 5] and side == expected[3:]
    rollouts = [read_lines(folder / "rollouts.jsonl") for folder in (whole_run, interrupted)]
    texts = [{(one["step"], one["prompt"], one["response"]) for one in lines} for lines in rollouts]
    assert texts[0] == texts[1]
    tokens = [read_lines(folder / "tokens.jsonl") for folder in (whole_run, interrupted)]
    assert [line["step"] for line in tokens[0]] == [line["step"] for line in tokens[1]]
    assert {line["step"] for line in read_lines(interrupted / "tokens.cut-1.jsonl")} == {3, 4, 5}
    before, said = check_ledger(whole_run), check_ledger(interrupted)
    assert said["ends"]["trained"] == before["ends"]["trained"] == NUM_STEPS * 4
    (resumption,) = said["resumptions"]
    assert resumption["after_step"] == 2 and resumption["undone_steps"] == (3, 4, 5)
    assert len(resumption["untrained_prompts"]) == 3 * 4
    trained_again = check_ledger(interrupted)["submitted"] - said["ends"]["unfinished"]
    assert trained_again == NUM_STEPS * 4, "none was lost, none twice"
    steps = ["step-00000002", "step-00000004", "step-00000005"]
    assert names(interrupted / "checkpoints") == ["final", "last.cut-1", *steps]


@pytest.mark.exhaustive
def test_a_lost_trainer_rank_changes_no_loss(config_file: Path, whole_run: Path, tmp_path: Path) -> None:
    """The rank is killed somewhere in step 2 or 3, wherever it is then."""
    run_dir = tmp_path / "run"
    process = start(config_file, f"run_dir={run_dir}")
    wait_for_step(run_dir, process)
    pid = pid_of(run_dir, "trainer", 1)
    os.kill(pid, signal.SIGKILL)
    out = finish_well(process, deadline_s=600.0)
    expected, lines = read_lines(whole_run / "metrics.jsonl"), read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    for line, whole in zip(lines[1:], expected[1:], strict=True):
        assert {key: line[key] for key in SAME} == {key: whole[key] for key in SAME}
    assert lines[-1]["faults/detected_trainer"] == lines[-1]["faults/recovered_trainer"] == 1
    assert f"trainer rank 1 (process {pid}) has died" in out
    events = read_lines(run_dir / "faults.jsonl")
    assert [one["event"] for one in events] == ["detected", "recovered"]
    ends, before = check_ledger(run_dir)["ends"], check_ledger(whole_run)["ends"]
    assert ends["trained"] == before["trained"] == NUM_STEPS * 4
    for name in ("final", "step-00000004"):
        assert (run_dir / "checkpoints" / name).is_dir()
    assert not list(Path("/dev/shm").glob(f"forgeasync_payloads-{controller_of(run_dir)}-*"))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_run_killed_after_its_last_step_ends(config_file: Path, whole_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole_run, run_dir)
    arguments = (f"run_dir={run_dir}", "--resume", "latest")
    code, out, _ = run_here("--config", str(config_file), *arguments)
    assert code == 0 and f"the run is done: it has made {NUM_STEPS} steps" in out
    shutil.rmtree(run_dir / "checkpoints" / "final")
    finish_well(start(config_file, *arguments))
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == list(range(NUM_STEPS + 1))
    assert check_ledger(run_dir)["ends"]["trained"] == NUM_STEPS * 4
    assert (run_dir / "checkpoints" / "final").is_dir()


@pytest.mark.exhaustive
def test_a_run_resumed_under_another_layout(config_file: Path, whole_run: Path, interrupted: Path) -> None:
    process = start(
        config_file,
        f"run_dir={interrupted}",
        "trainer.parallel.num_procs=1",
        "trainer.parallel.expert=1",
        "max_steps=3",
        "--resume",
        str(interrupted / "checkpoints" / "step-00000002"),
    )
    out = finish_well(process)
    assert "the config differs; the earlier one moved to config.cut-1.yaml; max_steps: 5 -> 3" in out
    assert "trainer.parallel.expert: 2 -> 1, trainer.parallel.num_procs: 2 -> 1" in out
    line, whole = (read_lines(folder / "metrics.jsonl")[3] for folder in (interrupted, whole_run))
    assert line["loss"] == pytest.approx(whole["loss"], rel=1e-4, abs=1e-5)
    assert line["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert line["reward/mean"] == whole["reward/mean"]
    assert line["buffer/num_restarted"] >= 0


def test_a_start_that_never_trained_makes_room_for_the_next(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "model").model_copy(update={"run_dir": str(tmp_path / "run")})
    first = open_files(config, None)
    assert first.messages == ()
    first.run_dir.log("trainer-0").write_text("why it failed")
    assert list(check_run_dir(config, is_resumed=False)) == []
    second = open_files(config, None)
    (message,) = second.messages
    assert message.startswith("run_dir held a start that never trained; moved to metrics.cut-1.jsonl")
    assert "logs.cut-1" in message and not list(second.run_dir.logs.iterdir())
    second.run_dir.metrics.write_text('{"step": 0}\n{"step": 1}\n')
    with pytest.raises(ConfigError, match="already holds a run"):
        open_files(config, None)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("config", "only in how it is written"),
        ("name: [1", "it cannot be read (ParserError)"),
        ("- 1", "it holds no keys"),
    ],
)
def test_an_earlier_config_is_compared_by_its_values(tmp_path: Path, before: str, expected: str) -> None:
    config = tiny_config(tmp_path)
    assert _changes(dump_config(config) if before == "config" else before, config) == expected


def test_changes_of_the_config_are_named_with_both_values(tmp_path: Path) -> None:
    """Also texts that look like references, sections that are new, and no more than can be read."""
    config = tiny_config(tmp_path)
    earlier = config.model_copy(update={"name": "${x}", "max_steps": 7, "run_dir": "x" * 100})
    said = _changes(dump_config(earlier), config)
    long = '"' + "x" * 59
    assert said == f'max_steps: 7 -> 3, name: "${{x}}" -> "tiny", run_dir: {long}... -> null'
    many = _changes("name: tiny", config)
    assert many.count("->") == 12 and " more" in many.rpartition(" and ")[2]


def test_other_problems_under_the_same_names_are_refused(config_file: Path, interrupted: Path) -> None:
    """As if a file of the data had been written anew since."""
    file = interrupted / "checkpoints" / "step-00000002" / "run.json"
    state = json.loads(file.read_text())
    now, state["problems"] = state["problems"], "64 problems, of another day"
    file.write_text(json.dumps(state))
    arguments = ["--config", str(config_file), f"run_dir={interrupted}", "--resume", "latest"]
    code, _, err = run_here(*arguments)
    assert code == 2 and now.startswith("64 problems, ")
    assert f"data = {now!r}: has changed: the source must have 64 problems, of another day" in err


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=7"], ["seed = 7", "must be 0"]),
        (["data.num_train=32"], ["data.num_train = 32", "must be 64"]),
        (["lora={rank: 2, alpha: 4.0, targets: [q_proj]}"], ["lora = ", "must be None"]),
        (["max_steps=1"], ["max_steps = 1", "at least 2"]),
        (["checkpoint.folder=nowhere"], ["nowhere has no checkpoint"]),
    ],
)
def test_what_cannot_be_resumed_is_refused_before_anything_starts(
    config_file: Path, interrupted: Path, overrides: list[str], expected: list[str]
) -> None:
    before = (interrupted / "metrics.jsonl").read_text()
    arguments = ["--config", str(config_file), f"run_dir={interrupted}", *overrides, "--resume", "latest"]
    code, out, err = run_here(*arguments)
    assert code == 2, err
    assert all(part in err for part in expected), err
    assert not own_lines(out) and (interrupted / "metrics.jsonl").read_text() == before
    assert (interrupted / "checkpoints" / "step-00000004.tmp").exists()
