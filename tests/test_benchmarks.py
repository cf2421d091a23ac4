"""The programs in benchmarks/, of which tests run only few."""

import os
import subprocess
import sys

from tests.support.app_runs import REPOSITORY

WITHOUT_OUR_PACKAGES = {"trl_side"}
"""Started in an environment of its own."""


def test_every_benchmark_can_be_imported() -> None:
    """What they make at their start, such as a profile that the product's classes check, is made."""
    folder = REPOSITORY / "benchmarks"
    names = sorted({file.stem for file in folder.glob("*.py")} - WITHOUT_OUR_PACKAGES)
    assert len(names) > 40
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    paths = {"PYTHONPATH": f"{folder}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | paths, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
