"""What logging tokens in flight costs the generator: generated tokens/s with and without.

    python benchmarks/in_flight_overhead.py [--model FOLDER] [--rounds R] [--out FILE.json]

One engine samples the same groups with the same seeds again and again (``engine_rounds.py``). Groups with an
id are logged and others are not, so that rounds with and without a log take turns. Reported: the median over
rounds, the median of the ratios of neighbouring rounds, the bytes that a token takes in the log, and the
share of processor time that logging took by itself, which other processes of the machine disturb less.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from common import REPOSITORY, RESULTS, machine_facts, write_json
from engine_rounds import NUM_PROMPTS, order_of, print_ratio, sample_round, start_engine
from rich.console import Console


async def measure(model: Path, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Tokens/s of every round with and without a log, and facts of the rounds with one."""
    engine = await start_engine(model, folder / "log")
    recorder = engine._recorder
    stepped, logging_s = recorder.stepped, 0.0

    def timed(outputs: object) -> None:
        nonlocal logging_s
        start_s = time.thread_time()
        stepped(outputs)
        logging_s += time.thread_time() - start_s

    recorder.stepped = timed
    found: dict[str, list[float]] = {
        "off": [],
        "on": [],
        "logging_s": [],
        "processor_s": [],
        "bytes_per_token": [],
    }
    for number in range(rounds + 1):
        for name in order_of(number):
            logging_s = 0.0
            start_processor_s = time.process_time()
            done = await sample_round(engine, number, is_named=name == "on")
            if number:  # the first pair warms up
                found[name].append(done.tokens_per_s)
                if name == "on":
                    found["logging_s"].append(logging_s)
                    found["processor_s"].append(time.process_time() - start_processor_s)
                    num_bytes = sum(file.stat().st_size for file in (folder / "log").iterdir())
                    found["bytes_per_token"].append(num_bytes / done.num_tokens)
            for index in range(NUM_PROMPTS):
                engine.forget_group(index)
    engine.shutdown()
    return found


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="What logging tokens in flight costs the generator.")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "tiny_moe")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "in_flight_overhead.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = asyncio.run(measure(arguments.model, arguments.rounds, Path(folder)))
    console = Console(width=100)
    ratio = print_ratio(console, "log", found)
    share = sum(found["logging_s"]) / sum(found["processor_s"])
    console.print(f"logging took {share:.1%} of the processor time of the rounds with a log")
    console.print(f"a token took {statistics.median(found['bytes_per_token']):.0f} bytes in the log")
    write_json(arguments.out, {"machine": machine_facts(), **found, "ratio_to_off": ratio, "share": share})


if __name__ == "__main__":
    main()
