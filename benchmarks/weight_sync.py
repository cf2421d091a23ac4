"""Weights on their way from the trainer into engines that decode: each transport, by the size of the model.

    python benchmarks/weight_sync.py [--sizes 2M,50M,500M] [--steps N] [--rounds N] [--out FILE.json]

Each measurement is a separate run with two trainer processes (FSDP2 with expert parallelism 2) and one
generator. Transports take turns in each round. A run's metrics.jsonl has the longest time of each step; the
table has medians over steps and rounds.

- publish: time until a version is staged while training continues, compared with a copy of as many bytes
- fetch: time of a fetch while the generator decodes, compared with a copy of as many bytes
- pause: time for which decoding pauses for the swap
- moved: bytes moved by fetches, as a share of the bytes that the engine needs
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from common import RESULTS, machine_facts, write_json
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import forgeasync as fa
from forgeasync.testing import tiny_config, write_tiny_model

TRANSPORTS = ("shared_memory", "rdma", "torchstore")
SIZES = {
    "2M": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_experts": 8,
        "moe_intermediate_size": 128,
    },
    "50M": {
        "hidden_size": 512,
        "num_hidden_layers": 7,
        "head_dim": 128,
        "num_experts": 16,
        "moe_intermediate_size": 256,
    },
    "500M": {
        "hidden_size": 1024,
        "num_hidden_layers": 6,
        "head_dim": 256,
        "num_experts": 32,
        "moe_intermediate_size": 768,
    },
}
"""Dimensions of a Qwen3-MoE, by number of parameters."""
NUM_SKIPPED_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Medians over the steps of one run of a transport."""

    size: str
    transport: str
    publish_s: float
    fetch_s: float
    pause_s: float
    num_bytes_needed: float
    moved_share: float
    copy_s: float
    """Seconds for one thread of this process to copy the needed bytes, right after the run."""


def write_model(folder: Path, size: str) -> Path:
    """Write a random model of the given size, with the tiny model's tokenizer."""
    write_tiny_model(folder)
    config = Qwen3MoeConfig.from_pretrained(folder)
    for name, value in SIZES[size].items():
        setattr(config, name, value)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def copy_s(num_bytes: int) -> float:
    """Return the median seconds to copy ``num_bytes``."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def measure(size: str, transport: str, model: Path, num_steps: int, run_dir: Path) -> Measurement:
    """Run a transport once; return its measurement."""
    config = tiny_config(model).model_copy(update={"run_dir": str(run_dir)})
    result = fa.train(
        config, [f"max_steps={num_steps + NUM_SKIPPED_STEPS}", f"weights.transport={transport}"]
    )

    def median(key: str) -> float:
        return statistics.median([value for _, value in result.metric(key)][NUM_SKIPPED_STEPS:])

    num_needed = median("weights/num_bytes_needed")
    return Measurement(
        size=size,
        transport=transport,
        publish_s=median("weights/max_publish_s"),
        fetch_s=median("weights/max_fetch_s"),
        pause_s=median("generator/max_pause_s"),
        num_bytes_needed=num_needed,
        moved_share=median("weights/num_bytes_moved") / num_needed,
        copy_s=copy_s(int(num_needed)),
    )


def report(measurements: list[Measurement]) -> Table:
    """Return a table of medians over rounds, with a row for each size and transport."""
    table = Table(title="new weights, while the generator decodes")
    for column in ("model", "transport", "publish", "of a copy", "fetch", "of a copy", "pause", "moved"):
        table.add_column(column, justify="right")
    for size, transport in dict.fromkeys((one.size, one.transport) for one in measurements):
        own = [one for one in measurements if (one.size, one.transport) == (size, transport)]
        publish_s, fetch_s, pause_s, copied_s = (
            statistics.median(getattr(one, name) for one in own)
            for name in ("publish_s", "fetch_s", "pause_s", "copy_s")
        )
        table.add_row(
            f"{size}, {own[0].num_bytes_needed / 1e6:.0f} MB",
            transport,
            f"{publish_s * 1e3:.1f} ms",
            f"{publish_s / copied_s:.1f} x",
            f"{fetch_s * 1e3:.1f} ms",
            f"{fetch_s / copied_s:.1f} x",
            f"{pause_s * 1e3:.2f} ms",
            f"{statistics.median(one.moved_share for one in own):.0%}",
        )
    return table


def main() -> None:
    """Run all measurements, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="comma-separated; 500M needs 18 GiB")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_sync.json")
    arguments = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.sizes.split(","):
            model = write_model(Path(folder) / size, size)
            for number in range(arguments.rounds):
                for shift in range(len(TRANSPORTS)):
                    transport = TRANSPORTS[(number + shift) % len(TRANSPORTS)]
                    run_dir = Path(folder) / f"{size}-{transport}-{number}"
                    found.append(measure(size, transport, model, arguments.steps, run_dir))
    Console(width=140).print(report(found))
    content = {"machine": machine_facts(), "load_average": os.getloadavg()[0]}
    write_json(arguments.out, content | {"runs": [asdict(one) for one in found]})


if __name__ == "__main__":
    main()
