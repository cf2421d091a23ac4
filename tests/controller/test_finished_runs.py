"""A run that has made all of its steps, and is resumed."""

from pathlib import Path

import pytest

from forgeasync.config import RunConfig
from forgeasync.controller import preparation, take_up
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
    assert take_up(config_of(tmp_path, max_steps), "latest") is None and not resumed
    assert capsys.readouterr().out == (
        f"the run is done: it has made {NUM_STEPS} steps, and max_steps is {max_steps}; its model is "
        f"{run_dir.checkpoints / 'final'}. To go on with it, give a larger max_steps\n"
    )
    assert sorted(path.name for path in run_dir.path.rglob("*")) == before
    folder = run_dir.checkpoints / f"step-{NUM_STEPS:08d}"
    assert take_up(config_of(tmp_path, max_steps), str(folder)) is None and not resumed


def test_with_a_larger_max_steps_from_an_earlier_checkpoint_or_as_a_new_run_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resumed: list[str | None]
) -> None:
    """A new run is refused by the checks of its folder."""
    earlier = str(make_ended(tmp_path / "run").checkpoints / "step-00000010")
    for max_steps, choice in ((2 * NUM_STEPS, "latest"), (NUM_STEPS, earlier), (NUM_STEPS, None)):
        take_up(config_of(tmp_path, max_steps), choice)
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
    take_up(config_of(tmp_path, NUM_STEPS), "latest")
    assert resumed == ["latest"]
