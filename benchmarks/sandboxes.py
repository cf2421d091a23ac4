"""What boxes cost: starting one, a command in it, a run of a session, and memory, beside plain processes.

    python benchmarks/sandboxes.py [--rounds N] [--boxes N] [--kind bubblewrap|unsafe] [--out FILE.json]

In every round, one after the other: a plain ``sh -c true`` as a subprocess; a box that is entered, runs
``true`` and is closed; a further ``true``, a shell run and a Python run in a box that is there. Boxes side by
side: how long N of them take to start at once, and the memory of one, as the sum of the proportional set size
of all processes (shared pages counted once) before and after, divided by N. Files of a box are extra.
"""

import argparse
import asyncio
import math
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
from common import RESULTS, machine_facts, write_json
from rich.console import Console
from rich.table import Table

import forgeasync as fa

LIMIT_S = 60.0


async def taken_ms(call: Callable[[], Awaitable[object]]) -> float:
    begin = time.perf_counter()
    await call()
    return 1000 * (time.perf_counter() - begin)


async def one_after_the_other(
    section: fa.Bubblewrap | fa.UnsafeSubprocess, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each round, by what was timed."""
    names = ("bare process", "enter", "enter and exec", "close", "exec", "shell run", "python run")
    times: dict[str, list[float]] = {name: [] for name in names}

    async def bare() -> None:
        subprocess.run(["sh", "-c", "true"], check=True)

    async with fa.Sandbox(section) as kept:
        shell, python = await kept.shell(), await kept.python()
        for _ in range(rounds):
            times["bare process"].append(await taken_ms(bare))
            fresh = fa.Sandbox(section)
            times["enter"].append(await taken_ms(fresh.__aenter__))
            first = await taken_ms(lambda box=fresh: box.exec("true", timeout_s=LIMIT_S))
            times["enter and exec"].append(times["enter"][-1] + first)
            times["close"].append(await taken_ms(fresh.close))
            times["exec"].append(await taken_ms(lambda: kept.exec("true", timeout_s=LIMIT_S)))
            times["shell run"].append(await taken_ms(lambda: shell.run("true", timeout_s=LIMIT_S)))
            times["python run"].append(await taken_ms(lambda: python.run("1", timeout_s=LIMIT_S)))
    return times


async def side_by_side(section: fa.Bubblewrap | fa.UnsafeSubprocess, num_boxes: int) -> dict[str, float]:
    """Start boxes at once and look at their memory."""
    async with fa.Sandbox(section):
        before = _memory_mib()
        boxes = [fa.Sandbox(section) for _ in range(num_boxes)]
        try:
            start_ms = await taken_ms(lambda: asyncio.gather(*(box.__aenter__() for box in boxes)))
            memory_mib = (_memory_mib() - before) / num_boxes
            sessions = await asyncio.gather(*(box.python() for box in boxes))
            with_python_mib = (_memory_mib() - before) / num_boxes
            await asyncio.gather(*(one.close() for one in sessions))
        finally:
            await asyncio.gather(*(box.close() for box in boxes))
    return {
        "num_boxes": num_boxes,
        "start_ms": start_ms,
        "memory_mib": memory_mib,
        "memory_with_python_session_mib": with_python_mib,
    }


def _memory_mib() -> float:
    """Memory of everything below this process, the launcher of boxes included; nan for an ordinary user.

    Supervisors let nobody but root look at their memory, not even their own user.
    """
    if os.geteuid() != 0:
        return math.nan
    return sum(one.memory_full_info().pss for one in psutil.Process().children(recursive=True)) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--boxes", type=int, default=32)
    parser.add_argument("--kind", choices=["bubblewrap", "unsafe"], default="bubblewrap")
    parser.add_argument("--out", type=Path, default=RESULTS / "sandboxes.json")
    options = parser.parse_args()
    section = fa.Bubblewrap() if options.kind == "bubblewrap" else fa.UnsafeSubprocess()
    times = asyncio.run(one_after_the_other(section, options.rounds))
    together = asyncio.run(side_by_side(section, options.boxes))
    table = Table("", "median ms", "p99 ms", "smallest ms", title=f"{options.kind}, {options.rounds} rounds")
    figures = {}
    for name, values in times.items():
        p99 = sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
        figures[name] = {"median_ms": statistics.median(values), "p99_ms": p99, "min_ms": min(values)}
        table.add_row(name, *(f"{one:.1f}" for one in figures[name].values()))
    console = Console()
    console.print(table)
    console.print({name: round(value, 1) for name, value in together.items()})
    write_json(
        options.out,
        {
            "machine": machine_facts(),
            "kind": options.kind,
            "times": figures,
            "together": {name: value for name, value in together.items() if not math.isnan(value)},
        },
    )


if __name__ == "__main__":
    main()
