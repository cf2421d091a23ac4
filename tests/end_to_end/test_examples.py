"""Every example as a user runs it, on a model small enough for a test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forgeasync.config import dump_config, load_config
from forgeasync.testing import write_tiny_model
from tests.support.config_samples import SMALL_RUN
from tests.support.tiers import Starts, starts

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"

MAX_LINES = 80

SMALL = (
    *SMALL_RUN,
    "max_steps=1",
    "data.num_held_out=4",
    "evaluation.num_problems=4",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("examples") / "model")


@starts(Starts.PROCESSES)
def run(name: str, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.exhaustive
def test_the_loss_runs_to_its_end(model: Path, tmp_path: Path) -> None:
    out = run("own_loss.py", f"model.path={model}", f"run_dir={tmp_path / 'run'}", *SMALL)
    assert "step 1: mean gate" in out
    assert re.search(r"step +1/1 ", out), "the lines of the run are printed"
    assert (tmp_path / "run" / "checkpoints" / "final" / "config.json").exists()


@pytest.mark.exhaustive
def test_the_cells_of_the_notebook_run_one_after_the_other(model: Path, tmp_path: Path) -> None:
    paths = [f"model.path={model}", f"run_dir={tmp_path / 'run'}"]
    config = load_config(REPOSITORY / "configs" / "tiny_moe_cpu.yaml", [*SMALL, *paths])
    (tmp_path / "small.yaml").write_text(dump_config(config))
    out = run("notebook.py", str(tmp_path / "small.yaml"))
    assert "mean reward" in out and "metrics of the last step" in out


def test_examples_are_short() -> None:
    lengths = {file.name: len(file.read_text().splitlines()) for file in EXAMPLES.glob("*.py")}
    assert lengths and max(lengths.values()) < MAX_LINES
