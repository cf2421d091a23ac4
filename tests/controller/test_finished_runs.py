"""Runs that were done when they are resumed, and when a supervisor starts a run again (RestartPolicy)."""

import signal
from pathlib import Path

import pytest

from forgeasync.config import RunConfig
from forgeasync.controller import End, Ending, RestartPolicy, is_death, preparation, prepare_run
from forgeasync.observability import RunDir
from forgeasync.testing import tiny_config

NUM_STEPS = 14


def make_ended(folder: Path) -> RunDir:
    """A folder with what is looked at of a run that has ended."""
    run_dir = RunDir(path=folder)
    (run_dir.checkpoints / "final").mkdir(parents=True)
    checkpoint = run_dir.checkpoints / f"step-{NUM_STEPS:08d}"
    checkpoint.mkdir()
    (checkpoint / "run.json").write_text("{}")
    run_dir.metrics.write_text(f'{{"step": {NUM_STEPS}}}\n')
    run_dir.ledger.write_text('{"event": "opened"}\n{"event": "ended"}\n')
    return run_dir


def config_of(tmp_path: Path, max_steps: int) -> RunConfig:
    return tiny_config(tmp_path).model_copy(update={"run_dir": str(tmp_path / "run"), "max_steps": max_steps})


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What a run was prepared to go on from: it goes on where this is not empty."""
    found: list[str | None] = []
    monkeypatch.setattr(preparation, "prepare", lambda config, choice: found.append(choice))
    return found


@pytest.mark.parametrize("max_steps", [NUM_STEPS, NUM_STEPS - 4])
@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_without_a_larger_max_steps_it_is_said_to_be_done(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    resumed: list[str | None],
    max_steps: int,
    has_checkpoints: bool,
) -> None:
    run_dir = make_ended(tmp_path / "run")
    if not has_checkpoints:
        (run_dir.checkpoints / f"step-{NUM_STEPS:08d}" / "run.json").unlink()
    before = sorted(path.name for path in run_dir.path.rglob("*"))
    assert prepare_run(config_of(tmp_path, max_steps), "latest") is None and not resumed
    assert capsys.readouterr().out == (
        f"the run is done: it has made {NUM_STEPS} steps, and max_steps is {max_steps}; its model is "
        f"{run_dir.checkpoints / 'final'}. To continue it, give a larger max_steps\n"
    )
    assert sorted(path.name for path in run_dir.path.rglob("*")) == before
    folder = run_dir.checkpoints / f"step-{NUM_STEPS:08d}"
    assert prepare_run(config_of(tmp_path, max_steps), str(folder)) is None and not resumed


def test_with_a_larger_max_steps_from_an_earlier_checkpoint_or_as_a_new_run_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resumed: list[str | None]
) -> None:
    """A new run is refused by the checks of its folder."""
    earlier = str(make_ended(tmp_path / "run").checkpoints / "step-00000010")
    for max_steps, choice in ((2 * NUM_STEPS, "latest"), (NUM_STEPS, earlier), (NUM_STEPS, None)):
        prepare_run(config_of(tmp_path, max_steps), choice)
    assert resumed == ["latest", earlier, None] and capsys.readouterr().out == ""


@pytest.mark.parametrize("has_ledgers_end", [True, False])
def test_one_that_was_killed_between_its_last_step_and_its_end_goes_on(
    tmp_path: Path, resumed: list[str | None], has_ledgers_end: bool
) -> None:
    run_dir = make_ended(tmp_path / "run")
    if has_ledgers_end:
        (run_dir.checkpoints / "final").rmdir()
    else:
        run_dir.ledger.write_text('{"event": "opened"}\n')
    prepare_run(config_of(tmp_path, NUM_STEPS), "latest")
    assert resumed == ["latest"]


# --- by a supervisor ---

MAX_STARTS_WITHOUT_STEP = 5
"""As docs/failures.md says."""


def ending(
    exit_code: int = -9,
    *,
    stopped_by: signal.Signals | None = None,
    newest_step: int = 0,
    has_ended: bool = False,
    words: str = "was killed by SIGKILL",
) -> Ending:
    return Ending(
        exit_code=exit_code,
        stopped_by=stopped_by,
        newest_step=newest_step,
        has_ended=has_ended,
        words=words,
    )


@pytest.mark.parametrize(
    ("exit_code", "stopped_by", "decision"),
    [
        *((one, None, None) for one in (1, 3, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT)),
        # Done, refused and stopped runs stay ended; the last one was stopped before it handled the signal.
        *((one, None, End(exit_code=one)) for one in (0, 2, 130, 143)),
        (-signal.SIGTERM, None, End(exit_code=143)),
        # Whatever a run does that was told to stop.
        *((one, signal.SIGTERM, End(exit_code=one)) for one in (1, 143, 0)),
        (-signal.SIGKILL, signal.SIGTERM, End(exit_code=143)),
    ],
)
def test_only_a_death_is_followed_by_a_start(
    exit_code: int, stopped_by: signal.Signals | None, decision: End | None
) -> None:
    one = ending(exit_code, stopped_by=stopped_by)
    assert is_death(one) == (decision is None)
    assert RestartPolicy(0).after(one) == decision


def test_a_run_that_had_done_everything_is_not_started_again() -> None:
    decision = RestartPolicy(0).after(ending(has_ended=True, newest_step=9))
    assert isinstance(decision, End) and decision.exit_code == 0 and "SIGKILL" in (decision.words or "")


def test_only_steps_that_no_start_has_made_count_as_progress() -> None:
    """Steps that are made again after a checkpoint do not: the same batch would end the run for ever."""
    policy = RestartPolicy(3)
    for _ in range(MAX_STARTS_WITHOUT_STEP - 1):
        assert policy.after(ending(newest_step=3)) is None
    assert policy.after(ending(newest_step=4)) is None
    for newest_step in range(MAX_STARTS_WITHOUT_STEP - 1):
        assert policy.after(ending(newest_step=newest_step)) is None
    decision = policy.after(ending(1, newest_step=4, words="has ended with exit code 1: failed: OSError: x"))
    assert decision == End(
        exit_code=1,
        words=f"failed: {MAX_STARTS_WITHOUT_STEP} starts in a row made no new step (the newest one is 4); "
        "the last one has ended with exit code 1: failed: OSError: x",
    )
