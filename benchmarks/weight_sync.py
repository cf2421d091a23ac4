"""Weights on their way from the trainer to engines that decode, by transport and by the size of the model.

    python benchmarks/weight_sync.py [--sizes 2M,50M,500M] [--steps N] [--rounds N] [--out FILE.json]

Each measurement is a run of two trainer processes (FSDP2 with expert parallelism 2) and one generator.
Transports take turns, round after round. A run's metrics.jsonl has the longest time of each step; the table
has medians over steps and rounds.

- publish: until a version is staged, while the trainer goes on
- fetch: while the generator decodes
- pause: how long decoding stands still for the swap
- moved: bytes that the fetches moved, of those that the engine needs

The rows with a learning rate are of bfloat16 weights with ``weights.delta: exact``.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import RESULTS, machine_facts, print_table, write_json, write_model

import forgeasync as fa
from forgeasync.testing import tiny_config

BF16 = "weights.transport=tcp generator.dtype=bfloat16"
CASES = {name: f"weights.transport={name}" for name in ("shared_memory", "rdma", "tcp", "torchstore")}
CASES["tcp, bfloat16"] = BF16
for rate in ("1e-6", "1e-5", "1e-4"):
    CASES[f"tcp, {rate}"] = f"{BF16} weights.delta=exact trainer.optimizer.learning_rate={rate}"
"""Overrides of a run, by the name of its row."""
DIMENSIONS = ("hidden_size", "num_hidden_layers", "head_dim", "num_experts", "moe_intermediate_size")
SIZES = {"2M": (128, 4, 32, 8, 128), "50M": (512, 7, 128, 16, 256), "500M": (1024, 6, 256, 32, 768)}
"""Dimensions of a Qwen3-MoE, by its number of parameters."""
NUM_SKIPPED_STEPS = 2
TIMES = {"publish_s": 1, "fetch_s": 1, "pause_s": 2}
"""Digits of the table's milliseconds."""


def measure(case: str, model: Path, num_steps: int, run_dir: Path) -> dict[str, float]:
    """Run one case once. Returns medians over steps."""
    config = tiny_config(model).model_copy(update={"run_dir": str(run_dir)})
    result = fa.train(config, [f"max_steps={num_steps + NUM_SKIPPED_STEPS}", *CASES[case].split()])

    def median(key: str) -> float:
        return statistics.median([value for _, value in result.metric(key)][NUM_SKIPPED_STEPS:])

    num_needed = median("weights/num_bytes_needed")
    return {
        "publish_s": median("weights/max_publish_s"),
        "fetch_s": median("weights/max_fetch_s"),
        "pause_s": median("generator/max_pause_s"),
        "num_bytes_needed": num_needed,
        "moved_share": median("weights/num_bytes_moved") / num_needed,
    }


def cells(size: str, transport: str, own: Sequence[dict[str, float]]) -> list[str]:
    """Return a row of the table: medians over rounds."""
    one = {key: statistics.median(each[key] for each in own) for key in own[0]}
    times = [f"{one[key] * 1e3:.{digits}f} ms" for key, digits in TIMES.items()]
    return [f"{size}, {one['num_bytes_needed'] / 1e6:.0f} MB", transport, *times, f"{one['moved_share']:.0%}"]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="comma-separated; 500M needs 18 GiB")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_sync.json")
    arguments = parser.parse_args()
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.sizes.split(","):
            model = Path(folder) / size
            write_model(model, **dict(zip(DIMENSIONS, SIZES[size], strict=True)))
            for number in range(arguments.rounds):
                for shift in range(len(CASES)):
                    case = list(CASES)[(number + shift) % len(CASES)]
                    run_dir = Path(folder) / f"{size}-{case}-{number}"
                    found = measure(case, model, arguments.steps, run_dir)
                    runs.setdefault((size, case), []).append(found)
    print_table(
        "new weights, while the generator decodes",
        ("model", "transport", "publish", "fetch", "pause", "moved"),
        (cells(size, transport, own) for (size, transport), own in runs.items()),
        num_names=2,
    )
    found = [{"size": size, "transport": name, **one} for (size, name), own in runs.items() for one in own]
    write_json(arguments.out, {"machine": machine_facts(), "runs": found})


if __name__ == "__main__":
    main()
