"""What a process's trace costs a generator: generated tokens/s with and without.

    python benchmarks/trace_overhead.py [--model FOLDER] [--rounds R] [--out FILE.json]

One engine samples the same groups with the same seeds again and again (``engine_rounds.py``); the trace is
opened and closed around every second round. Reported: the median over rounds, the median of the ratios of
neighbouring rounds, and the share of processor time that tracing took by itself, which other processes of the
machine disturb less.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from common import REPOSITORY, RESULTS, machine_facts, write_json
from engine_rounds import order_of, print_ratio, sample_round, start_engine
from rich.console import Console

from forgeasync.tracing import State, proc_trace


class Timed(proc_trace.ProcTrace):
    """A trace that counts its own processor time, that of its thread included."""

    tracing_s = 0.0

    def begin(self, state: State) -> None:
        start_s = time.thread_time()
        super().begin(state)
        Timed.tracing_s += time.thread_time() - start_s

    def end(self, state: State) -> None:
        start_s = time.thread_time()
        super().end(state)
        Timed.tracing_s += time.thread_time() - start_s

    def add_span(self, name: str, facts: proc_trace.Facts, start_s: float) -> None:
        begin_s = time.thread_time()
        super().add_span(name, facts, start_s)
        Timed.tracing_s += time.thread_time() - begin_s

    def _write(self, data: bytes) -> None:
        start_s = time.thread_time()
        super()._write(data)
        Timed.tracing_s += time.thread_time() - start_s


async def measure(model: Path, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Tokens/s of every round with and without a trace, and processor time of the rounds with one."""
    proc_trace.ProcTrace = Timed
    engine = await start_engine(model, None)
    found: dict[str, list[float]] = {"off": [], "on": [], "tracing_s": [], "processor_s": []}
    for number in range(rounds + 1):
        for name in order_of(number):
            if name == "on":
                proc_trace.open_trace(folder, "generator-0", idle=State.WAITING_FOR_ROOM)
            Timed.tracing_s, start_processor_s = 0.0, time.process_time()
            done = await sample_round(engine, number, is_named=True)
            if number:  # the first pair warms up
                found[name].append(done.tokens_per_s)
            if name == "on":
                proc_trace.close_trace()
                if number:
                    found["tracing_s"].append(Timed.tracing_s)
                    found["processor_s"].append(time.process_time() - start_processor_s)
    engine.shutdown()
    return found


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="What a process's trace costs a generator.")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "tiny_moe")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "trace_overhead.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(arguments.model, arguments.rounds, Path(folder)))
    console = Console(width=100)
    ratio = print_ratio(console, "trace", found)
    share = sum(found["tracing_s"]) / sum(found["processor_s"])
    console.print(f"tracing took {share:.3%} of the processor time of the rounds with a trace")
    write_json(arguments.out, {"machine": machine_facts(), **found, "ratio_to_off": ratio, "share": share})


if __name__ == "__main__":
    main()
