"""A trainer step against the same model in plain transformers: same tokens, packed against padded.

    python benchmarks/trainer_throughput.py [--model FOLDER] [--rounds R] [--sequences N] [--out FILE.json]

Contenders take turns, each in processes of its own, over the same sequences with the same loss (ppo_clip,
mean over tokens), optimizer settings, dtype (float32) and number of threads; on the same weights their losses
have to agree. Each first tries a few sizes (sequences of a microbatch, tokens of a row) and goes on with its
fastest. Lengths are those of the embedded default's rollouts, and lognormal ones whose longest is 64 times
the shortest. Memory is the peak resident size above that before the model was built, summed over processes.

All of this runs on CPUs, also on a machine with a GPU; ``trainer_gpu.py`` measures there.
"""

import argparse
import dataclasses
import os
import socket
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import REPOSITORY, RESULTS, machine_facts, write_json
from rich.console import Console
from rich.table import Table
from throughput_data import DISTRIBUTIONS, make_sequences, num_tokens, with_room
from throughput_process import (
    PACKED,
    PACKED_COMPILED,
    PADDED,
    PADDED_SORTED,
    PAIR,
    PAIR_COMPILED,
    Command,
    Contender,
    Step,
    Work,
)

from forgeasync.trainer import TrainingSequence

MICRO_BATCHES = (4, 8, 16, 32)
ROW_TOKENS = (2048, 4096, 8192)
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A contender's rounds on one distribution and number of cores."""

    lengths: str
    cores: int
    contender: str
    size: int
    tokens_per_s: float
    speed_ratio: float
    """Median over the rounds of the baseline's step time by this one's."""
    peak_mib: float
    peak_ratio: float
    step_s: list[float]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def open_contenders(model: Path, sequences: list[TrainingSequence]) -> list[Contender]:
    """Start all contenders; the baseline comes first."""

    def contender(name: str, sizes: Sequence[int], num_procs: int = 1) -> Contender:
        work = Work(contender=name, model=model, sequences=sequences, port=free_port())
        return Contender(work, num_procs=num_procs, sizes=sizes)

    longest = max(sequence.num_tokens for sequence in sequences)
    rows = [size for size in ROW_TOKENS if size >= longest]
    return [
        contender(PADDED, MICRO_BATCHES),
        contender(PADDED_SORTED, MICRO_BATCHES),
        contender(PACKED, rows),
        contender(PACKED_COMPILED, rows),
        contender(PAIR, rows, num_procs=2),
        contender(PAIR_COMPILED, rows, num_procs=2),
    ]


def check_same_loss(steps: dict[str, Step]) -> None:
    """Raises RuntimeError where contenders do not compute the same on the same weights."""
    base = steps[PADDED]
    for name, step in steps.items():
        if abs(step.loss - base.loss) > LOSS_TOLERANCE:
            raise RuntimeError(f"loss of {name!r} is {step.loss}, of {PADDED!r} {base.loss}")
        if abs(step.grad_norm / base.grad_norm - 1.0) > 1e-3:
            raise RuntimeError(f"gradient norm of {name!r} is {step.grad_norm}, not {base.grad_norm}")


def measure(
    lengths: str, sequences: list[TrainingSequence], contenders: list[Contender], cores: int, rounds: int
) -> list[Measurement]:
    """Rounds of one step each, in rotating order, with every contender's threads filling ``cores``."""
    running = [contender for contender in contenders if contender.num_procs <= cores]
    commands = {}
    for contender in running:
        num_threads = cores // contender.num_procs
        size = contender.best_size(num_threads)
        print(f"{lengths}, {cores} cores, {contender.name}: fastest at {size}", flush=True)
        commands[contender.name] = Command(size=size, num_threads=num_threads)
        contender.step(dataclasses.replace(commands[contender.name], trims=True))
    steps: dict[str, list[Step]] = {contender.name: [] for contender in running}
    for number in range(rounds):
        start = number % len(running)
        for contender in running[start:] + running[:start]:
            steps[contender.name].append(contender.step(commands[contender.name]))
    check_same_loss({name: of_one[-1] for name, of_one in steps.items()})
    base = steps[PADDED]
    return [
        Measurement(
            lengths=lengths,
            cores=cores,
            contender=name,
            size=commands[name].size,
            tokens_per_s=num_tokens(sequences) / statistics.median(step.step_s for step in of_one),
            speed_ratio=statistics.median(b.step_s / s.step_s for b, s in zip(base, of_one, strict=True)),
            peak_mib=of_one[-1].peak_bytes / 2**20,
            peak_ratio=of_one[-1].peak_bytes / base[-1].peak_bytes,
            step_s=[step.step_s for step in of_one],
        )
        for name, of_one in steps.items()
    ]


def report(measurements: Sequence[Measurement]) -> Table:
    """A row per contender; ratios are to the padded baseline in the order of the batch."""
    table = Table(title="trainer step: packed against padded")
    for column in ("lengths", "cores", "contender"):
        table.add_column(column)
    for column in ("sequences or row tokens", "tokens/s", "ratio", "peak MiB", "ratio"):
        table.add_column(column, justify="right")
    for one in measurements:
        table.add_row(
            one.lengths,
            str(one.cores),
            one.contender,
            str(one.size),
            f"{one.tokens_per_s:,.0f}",
            f"{one.speed_ratio:.2f}",
            f"{one.peak_mib:.0f}",
            f"{one.peak_ratio:.2f}",
        )
    return table


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Packed trainer steps against padded ones.")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "tiny_moe")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=192, help="of a step")
    parser.add_argument("--out", type=Path, default=RESULTS / "trainer_throughput.json")
    arguments = parser.parse_args()
    # Before any process is started: the trainer looks for a GPU as soon as it is imported.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    measurements: list[Measurement] = []
    num_cores = min(2, len(os.sched_getaffinity(0)))
    for name, draw in DISTRIBUTIONS.items():
        lengths = draw(arguments.sequences)
        with tempfile.TemporaryDirectory() as scratch:
            model = with_room(arguments.model, Path(scratch) / "model", lengths)
            sequences = make_sequences(model, lengths)
            contenders = open_contenders(model, sequences)
            for cores in range(1, num_cores + 1):
                measurements += measure(name, sequences, contenders, cores, arguments.rounds)
            for contender in contenders:
                contender.close()
    Console(width=110).print(report(measurements))
    content: dict[str, Any] = {"machine": machine_facts(), "rounds": arguments.rounds}
    content |= {"measurements": [dataclasses.asdict(one) for one in measurements]}
    write_json(arguments.out, content)


if __name__ == "__main__":
    main()
