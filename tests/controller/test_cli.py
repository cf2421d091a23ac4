"""Arguments of apps, and signals to stop, as processes get them."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forgeasync.config import load_config
from forgeasync.controller import parse_arguments

pytestmark = pytest.mark.processes

APP = """
import asyncio, sys, time
from pathlib import Path
from forgeasync.controller import cli
from forgeasync.controller.cli import exit_code, received_signal, run_main, telling
from forgeasync.rollouts.run_folder import create_run_folder, remove_run_folder

cli.SAME_S = float(sys.argv[3])

async def main(ending):
    folder = create_run_folder(0, root=Path(sys.argv[1]))
    with telling(lambda number: print("told", number.name, flush=True)):
        print("ready", flush=True)
        try:
            await asyncio.sleep(600)
        finally:
            print("ending after", received_signal().name, flush=True)
            if ending == "fails":
                raise RuntimeError("while cleaning up")
            if ending == "blocks":
                time.sleep(600)
            await asyncio.sleep(600 if ending == "hangs" else 0)
            remove_run_folder(folder)

def run():
    if sys.argv[2] == "prepares":
        print("ready", flush=True)
        time.sleep(600)
    run_main(main(sys.argv[2]))

sys.exit(exit_code(run))
"""


@contextmanager
def started(root: Path, ending: str, *, same_s: float = 3600.0) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", APP, str(root), ending, str(same_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs have it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "ending"),
    [(signal.SIGINT, "cleans"), (signal.SIGTERM, "fails")],
)
def test_the_first_signal_ends_in_order(tmp_path: Path, number: signal.Signals, ending: str) -> None:
    with started(tmp_path, ending) as process:
        process.send_signal(number)
        # Schedulers may send it twice.
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert out.splitlines() == [f"told {number.name}", f"ending after {number.name}"]
    if ending == "fails":
        assert err.splitlines()[-1] == "failed: RuntimeError: while cleaning up"
    else:
        assert err == f"interrupted by {number.name}\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("ending", ["hangs", "blocks"])
def test_a_second_signal_ends_at_once_and_leaves_no_memory(tmp_path: Path, ending: str) -> None:
    with started(tmp_path, ending, same_s=0.0) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "told SIGTERM\n"
        assert process.stdout.readline() == "ending after SIGTERM\n"
        assert list(tmp_path.iterdir())
        process.send_signal(signal.SIGINT)
        assert process.wait() == 143
    assert not list(tmp_path.iterdir())


def test_a_signal_before_anything_runs(tmp_path: Path) -> None:
    with started(tmp_path, "prepares") as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (130, "interrupted by SIGINT\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--max_steps=3"], "--max_steps=3: no such option; for a key of the config, write max_steps=3\n"),
        (["--max-steps", "3"], "--max-steps: no such option; for a key of the config, write max_steps=3\n"),
        (["--rehearse", "max_steps=3"], "--rehearse: no such option; see --help\n"),
        (["--dryrun"], "--dryrun: no such option; did you mean --dry-run?\n"),
    ],
)
def test_options_that_do_not_exist_are_answered_with_what_to_type(
    given: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["apps/grpo.py", "--config", "x.yaml", *given])
    with pytest.raises(SystemExit) as ended:
        parse_arguments("", starts_run=True)
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(words)


def test_help_has_overrides_that_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["apps/grpo.py", "--help"])
    with pytest.raises(SystemExit):
        parse_arguments("", starts_run=True)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("usage: python -m apps.grpo ")
    quoted = re.findall(r"'([a-z_.]+=\[.*?\])'", said)
    plain = re.findall(r"(?<= )[a-z_.]+=\w+", said.partition("replaces values")[2])
    assert len(quoted) == 1 and len(plain) == 3
    load_config("configs/tiny_moe_cpu.yaml", [*quoted, *plain])


PROC = """
import signal, subprocess, sys, time
from forgeasync.runtime import bootstrap_main
for number in bootstrap_main.STOP_SIGNALS:
    signal.signal(number, bootstrap_main.stay)
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
print("ready", flush=True)
child.wait()
print("child", child.returncode, flush=True)
time.sleep(600)
"""


def test_procs_stay_and_what_they_start_can_be_stopped() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROC], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {"ready\n", "up\n"}
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == f"child {-signal.SIGTERM}\n"
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
