"""What works on one GPU, and how fast: fifteen minutes; most of it needs torch alone.

    python benchmarks/gpu_probe.py [--json FILE] [--seconds 900] [--device cuda|cpu] [--part NAME]

Each part runs in its own process with a time limit and prints a line of JSON: name, whether all was right,
figures with their units in their names, the statements that were checked, and errors with the ends of their
tracebacks. The most important parts come first. A part that is stopped keeps the results that it has. Parts
whose packages are missing say so.

``--device cpu`` tries the script at small sizes, without CUDA graphs and with a stand-in for the attention
kernel. Its figures mean nothing. ``--part NAME`` runs one part in this process.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent

LOG_TAIL_LINES = 25

KILL_WAIT_S = 20.0
"""Longest wait for a killed process, which may hang in the driver."""


PARTS = {
    "machine": ("gpu_probe_machine", 90.0),
    "staging": ("gpu_probe_machine", 90.0),
    "swap": ("gpu_probe_machine", 90.0),
    "fused_adamw": ("gpu_probe_trainer", 60.0),
    "varlen_attention": ("gpu_probe_kernels", 60.0),
    "moe_trainer": ("gpu_probe_trainer", 120.0),
    "grouped_products": ("gpu_probe_kernels", 60.0),
    "kept_logprobs": ("gpu_probe_kernels", 60.0),
    "checkpoint_copies": ("gpu_probe_machine", 60.0),
    "engine": ("gpu_probe_engine", 360.0),
}
"""Module and limit in seconds of each part, a function of that name. Nothing of it is imported here."""

Line = dict[str, Any]


def run_part(name: str, device_kind: str, file: Path | None) -> Line:
    """Run a part in this process and return its line. ``file`` always has its results so far."""
    from gpu_probe_common import Device, Report

    report = Report(file)
    start_s = time.perf_counter()
    with report.case("part"):
        getattr(importlib.import_module(PARTS[name][0]), name)(Device(device_kind), report)
    return {"name": name, **report.content(), "seconds": round(time.perf_counter() - start_s, 1)}


def empty_line(name: str) -> Line:
    """Return the line of a part without results."""
    found = {key: {} for key in ("figures", "checks", "errors", "skipped")}
    return {"name": name, "ok": False, **found, "seconds": 0.0}


def has_failed(line: Line) -> bool:
    """Whether anything in a part was wrong. A part that this machine cannot run has not failed."""
    return bool(line["errors"]) or not all(line["checks"].values())


def run_apart(command: Sequence[str], name: str, *, limit_s: float, environment: dict[str, str]) -> Line:
    """Run a part by ``command`` in its own process, and kill that after ``limit_s``.

    The command gets an option ``--file`` with the path for its line.
    """
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu_probe-") as scratch:
        file, log = Path(scratch) / "line.json", Path(scratch) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--file", str(file)],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            problem = _wait(process, limit_s)
        line = empty_line(name)
        if file.exists():
            line |= json.loads(file.read_text(encoding="utf-8"))
        if problem is not None:
            line["ok"] = False
            line["errors"]["process"] = problem
        if line["errors"]:
            said = log.read_text(encoding="utf-8", errors="replace")
            line["log_tail"] = said.splitlines()[-LOG_TAIL_LINES:]
        return {**line, "seconds": round(time.perf_counter() - start_s, 1)}


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str | None:
    """Return why the process failed or was stopped; None if it succeeded."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        # A run that a part has started ends with its interrupt.
        for sent in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(process.pid, sent)
                process.wait(KILL_WAIT_S)
        return f"stopped after its limit of {limit_s:.0f} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return None if code == 0 else f"ended with exit code {code}"


def child_environment(device_kind: str) -> dict[str, str]:
    """Return this process's environment, with settings for a machine without a network and with one GPU."""
    # Without a resolver gloo does not find an interface.
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device_kind == "cpu" else {}
    return {**defaults, **os.environ, "PYTHONUNBUFFERED": "1", **hidden}


def table(lines: Sequence[Line]) -> str:
    """Return a line for each part, and below it its errors and skipped cases."""
    rows = []
    for line in lines:
        verdict = "FAILED" if has_failed(line) else "ok" if line["ok"] else "skipped"
        right = sum(line["checks"].values())
        rows.append(
            f"{line['name']:18} {verdict:8} {line['seconds']:6.1f} s   {right}/{len(line['checks'])} checks"
        )
        rows += [f"    not right: {name}" for name, is_right in line["checks"].items() if not is_right]
        rows += [f"    error in {name}: {text.splitlines()[-1]}" for name, text in line["errors"].items()]
        rows += [f"    skipped {name}: {reason}" for name, reason in line["skipped"].items()]
    return "\n".join(rows)


def main() -> int:
    """Run the parts, print their lines and the table. The exit code is 1 if a part failed."""
    parser = argparse.ArgumentParser(description="What works on one GPU, part by part.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=900.0, help="for all parts together")
    parser.add_argument("--json", type=Path, help="write the lines there too")
    parser.add_argument("--part", choices=PARTS, help="this one alone, in this process")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    if arguments.part is not None:
        os.environ |= child_environment(arguments.device)
        line = run_part(arguments.part, arguments.device, arguments.file)
        if arguments.file is not None:
            arguments.file.write_text(json.dumps(line), encoding="utf-8")
            return 0
        print(json.dumps(line, indent=2), flush=True)
        return 0 if line["ok"] else 1
    end_s = time.monotonic() + arguments.seconds
    lines = []
    file = arguments.json or Path(os.devnull)
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--device", arguments.device, "--part"]
    environment = child_environment(arguments.device)
    with file.open("w", encoding="utf-8") as output:
        for name, (_, part_s) in PARTS.items():
            limit_s = min(part_s, end_s - time.monotonic())
            if limit_s < 5.0:
                line = empty_line(name)
                line["errors"]["part"] = f"not started: the {arguments.seconds:.0f} s of --seconds were over"
            else:
                line = run_apart([*command, name], name, limit_s=limit_s, environment=environment)
            lines.append(line)
            for one in (sys.stdout, output):
                print(json.dumps(line), file=one, flush=True)
    print(table(lines), flush=True)
    return 1 if any(has_failed(line) for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
