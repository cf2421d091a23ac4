"""Runs of the command as a user starts them, and what they leave."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from forgeasync.buffer import verify
from forgeasync.config import dump_config, load_config
from forgeasync.controller import newest_step
from forgeasync.observability import METRICS, undefined
from forgeasync.testing import tiny_config, write_tiny_model
from tests.support.processes import send_signal
from tests.support.tiers import Starts, starts
from tests.support.warm_python import sessions_below, wait_until_imported, warm_python

REPOSITORY = Path(__file__).parents[2]
NEVER_ENDING = "max_steps=100000"
DEADLINE_S = 240.0
END_S = 60.0
"""Time for processes of a run to be gone once the run itself has ended."""
ALWAYS = frozenset(metric.key for metric in METRICS if metric.when == "every step" and "<" not in metric.key)
OF_STEP_0 = {key for key in ALWAYS if key.startswith("metrics/")} | {
    *("step", "policy_version", "time/eval_s", "time/elapsed_s", "eval/num_unscored")
}
"""Metrics of every step's line, and of the line before the first step."""


@starts(Starts.PROCESSES)
def start(
    config_file: Path, *overrides: str, app: str = "apps.grpo", search_path: Path | None = None
) -> subprocess.Popen[str]:
    """``search_path`` has modules of the user's own."""
    more = {} if search_path is None else {"PYTHONPATH": str(search_path)}
    wait_until_imported("torchtitan", "vllm")
    return subprocess.Popen(
        [warm_python(), "-m", app, "--config", str(config_file), *overrides],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A process group of its own, as a shell gives its jobs: signals reach only this run.
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], *, deadline_s: float = DEADLINE_S) -> tuple[int, str, str]:
    """Wait for the end; whatever happens, nothing is left running."""
    try:
        out, err = process.communicate(timeout=deadline_s)
    finally:
        # A process that was told to end, or killed, needs a moment.
        end_s = time.monotonic() + END_S
        while (left := session_processes(process.pid)) and time.monotonic() < end_s:
            time.sleep(0.05)
        words = [_words(orphan) for orphan in left]
        send_signal(left)
    assert not left, f"left behind: {words}"
    return process.returncode, out, err


def finish_well(process: subprocess.Popen[str], *, deadline_s: float = DEADLINE_S) -> str:
    """Wait for the end of a run that is to end well; what it has printed."""
    code, out, err = finish(process, deadline_s=deadline_s)
    assert code == 0, err
    return out


@starts(Starts.PROCESSES)
def run_here(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command where it starts nothing and ends at once."""
    done = subprocess.run(
        [warm_python(), "-m", "apps.grpo", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def own_lines(out: str) -> list[str]:
    """What a run wrote but for its word that it removed files of dead runs, which tests beside it leave."""
    return [line for line in out.splitlines() if not line.endswith("of dead runs in /dev/shm were removed")]


def _words(process: psutil.Process) -> str:
    """Describe a process, which can end meanwhile."""
    try:
        return f"{process.pid} {process.status()} {process.cmdline()}"
    except psutil.Error as error:
        return f"{process.pid} {error}"


def controller_of(run_dir: Path) -> int:
    """Process id of a run's controller: a warm one is not the process that was started."""
    return json.loads((run_dir / "procs.json").read_text())["controller"]


def pid_of(run_dir: Path, role: str, rank: int) -> int:
    """Process id of one of a run's processes at this moment."""
    listed = json.loads((run_dir / "procs.json").read_text())["procs"]
    (pid,) = [one["pid"] for one in listed if (one["role"], one["rank"]) == (role, rank)]
    return pid


def session_processes(session: int) -> list[psutil.Process]:
    """The processes of a run that has led a session, and of the sessions of its forks."""
    found, sessions = [], sessions_below(session)
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def read_lines(file: Path) -> list[dict[str, float]]:
    """The records of a file; those of metrics.jsonl hold what the definitions say."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if file.name == "metrics.jsonl":
        for line in lines:
            assert undefined(line) == [], "keys without a definition in forgeasync/observability"
            always = OF_STEP_0 if line["step"] == 0 else ALWAYS
            assert always - line.keys() == set(), "keys that every line has by their definitions"
    return lines


def check_open_ledger(run_dir: Path) -> dict[str, object]:
    """Prove from its files that a run which did not make all its steps has lost no prompt, and none twice.

    Returns what ``apps.verify --json`` prints.
    """
    verdict = _checked(run_dir)
    book = verdict.reading.book
    assert not book.is_ended and book.totals.step and book.open_prompts
    return verdict.as_json()


def check_ledger(run_dir: Path) -> dict[str, object]:
    """Prove a run that made all its steps from its files; returns what ``apps.verify --json`` prints."""
    said = _checked(run_dir).as_json()
    num_ends = sum(sum(num.values()) if isinstance(num, dict) else num for num in said["ends"].values())
    assert said["is_ended"] and num_ends == said["submitted"] and not said["open"]
    assert said["compared_steps"] == said["step"] == read_lines(run_dir / "metrics.jsonl")[-1]["step"]
    return said


def _checked(run_dir: Path) -> Any:
    verdict = verify(run_dir / "ledger.jsonl", run_dir / "metrics.jsonl")
    assert verdict.contradiction is None, verdict.contradiction
    return verdict


def wait_until_shown(
    is_shown: Callable[[], bool], process: subprocess.Popen[str], *, limit_s: float = DEADLINE_S
) -> None:
    """Wait until the files of a run show something; the run has to go on until then."""
    end_s = time.monotonic() + limit_s
    while not is_shown():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s, is_shown
        time.sleep(0.02)


def wait_for_step(run_dir: Path, process: subprocess.Popen[str]) -> None:
    wait_until_shown(lambda: newest_step(run_dir / "metrics.jsonl") > 0, process)


def write_tiny_run(folder: Path, *overrides: str, scale: float = 1.0) -> Path:
    """Write a model and the config of a run of three steps; the file. ``scale``: of the model's weights."""
    file = folder / "run.yaml"
    file.write_text(dump_config(tiny_config(write_tiny_model(folder / "model", scale=scale))))
    if overrides:
        file.write_text(dump_config(load_config(file, overrides)))
    return file


def write_episodes_run(folder: Path) -> Path:
    """Write a run of two steps for environments, of which it has none yet.

    One trainer proc, kept sets and routing replay on, all rollouts written.
    """
    return write_tiny_run(
        folder,
        "trainer.parallel={num_procs: 1, expert: 1}",
        "sampling={max_response_tokens: 12, top_k: 12, top_p: 0.9, temperature: 0.8}",
        "logging.rollouts_per_step=100",
        "evaluation.num_problems=4",
        "max_steps=2",
        scale=8.0,
    )
