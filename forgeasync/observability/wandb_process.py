"""The process that hands a run's metrics to Weights & Biases, so that nothing W&B does can hold the run up.

It reads JSON lines from its standard input: first what ``wandb.init`` is given, then a line of values for
each step, until the end of file, which ends the W&B run. It answers each line on its standard output:
``taken``, or what has gone wrong.
"""

import contextlib
import json
import os
import secrets
import signal
import sys
from pathlib import Path

TAKEN = "taken"

MAX_PROBLEM = 300
"""Characters of a problem that are told."""


def run_id(folder: Path) -> tuple[str, bool]:
    """Return the id under which W&B knows the run of a folder, and whether it was made before."""
    file = folder / "id"
    if file.exists():
        return file.read_text(encoding="utf-8").strip(), True
    made = secrets.token_hex(8)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(made + "\n", encoding="utf-8")
    return made, False


def _answer(descriptor: int, words: str) -> None:
    # The other end may be gone, and the W&B run is to be ended all the same.
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, " ".join(words.split())[:MAX_PROBLEM].encode() + b"\n")


def main() -> int:
    """Hand on what comes; returns the exit code."""
    # The end of file ends this process, after the last lines of a run that was told to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What libraries print is no answer.
    answers, sys.stdout = os.dup(1), sys.stderr
    os.dup2(2, 1)
    given = json.loads(sys.stdin.readline())
    folder = Path(given["folder"])
    try:
        import wandb

        name, was_there = run_id(folder)
        is_online = given["mode"] == "online"
        run = wandb.init(
            project=given["project"],
            entity=given["entity"],
            name=given["name"],
            config=given["config"],
            mode=given["mode"],
            dir=str(folder),
            id=name,
            resume="allow" if was_there and is_online else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        # Steps that are made again after a resumption are further points, and no step is refused as too old.
        run.define_metric("*", step_metric="step")
    except Exception as error:
        _answer(answers, f"wandb.init: {type(error).__name__}: {error}")
        return 1
    for line in sys.stdin:
        try:
            run.log(json.loads(line))
        except Exception as error:
            _answer(answers, f"run.log: {type(error).__name__}: {error}")
        else:
            _answer(answers, TAKEN)
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
