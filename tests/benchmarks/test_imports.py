"""The programs in benchmarks/, of which tests run only few."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forgeasync.config import load_config
from forgeasync.environments import build_source, weighted_order
from tests.support.app_runs import REPOSITORY

WITHOUT_OUR_PACKAGES = {"trl_side"}
"""Started in an environment of its own."""


def test_every_benchmark_can_be_imported() -> None:
    """What they make at their start, such as a profile that the product's classes check, is made."""
    folder = REPOSITORY / "benchmarks"
    names = sorted({file.stem for file in folder.glob("*.py")} - WITHOUT_OUR_PACKAGES)
    assert len(names) > 10
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    paths = {"PYTHONPATH": f"{folder}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_trl_trains_on_the_first_problems_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    from against_trl import CONFIG, write_tasks

    config = load_config(CONFIG, ["data.num_train=8", "data.num_held_out=4"])
    write_tasks(config, 12, tmp_path / "tasks.jsonl")
    order = weighted_order(build_source(config.data, seed=config.seed).train, {"": 1.0}, seed=config.seed)
    lines = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [order.next().prompt for _ in range(12)]
    assert all(json.loads(line["entry"])["question"] in line["prompt"] for line in lines)
