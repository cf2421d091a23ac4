"""What a run says last: how held-out accuracy went, and the command that shows its curves."""

import json
import os
import shlex
import sys
from pathlib import Path

from forgeasync.observability.run_dir import RunDir

ACCURACY = "eval/accuracy"
UNSCORED = "eval/num_unscored"
PLOT = "learning.png"
"""In the run's folder."""


def closing_lines(run_dir: RunDir) -> list[str]:
    """Two lines for people. Raises FileNotFoundError where the run has no metrics.jsonl."""
    out = run_dir.path / PLOT
    module = ("-m", "forgeasync.observability.plot")
    command = shlex.join([_own_python(), *module, str(run_dir.path), "--out", str(out)])
    return [_held_out_sentence(run_dir.metrics), f"its curves: {command}"]


def _held_out_sentence(metrics: Path) -> str:
    """From the first evaluation to the last one, also where the run was resumed in between."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    # A line lacks the key where its step was not evaluated, or where no response was scored.
    evaluated = [line for line in lines if line.get(ACCURACY) is not None]
    if not evaluated:
        num_unscored = [line[UNSCORED] for line in lines if UNSCORED in line]
        if num_unscored and not any(num_unscored):
            return "there were no held-out problems"
        return "held-out accuracy is unknown: no response to a held-out problem was scored"
    first, last = evaluated[0], evaluated[-1]
    if first is last:
        return f"held-out accuracy was {first[ACCURACY]:.1%} at step {first['step']}, and measured only then"
    num_steps = last["step"] - first["step"]
    steps = "step" if num_steps == 1 else "steps"
    minutes = (last["time/elapsed_s"] - first["time/elapsed_s"]) / 60
    return (
        f"held-out accuracy went from {first[ACCURACY]:.1%} to {last[ACCURACY]:.1%} in {num_steps} {steps}, "
        f"which took {minutes:.1f} minutes"
    )


def _own_python() -> str:
    """The interpreter that runs this, written as short as works in the working directory."""
    python, here = Path(sys.executable), Path.cwd()
    return os.path.relpath(python, here) if python.is_relative_to(here) else str(python)
