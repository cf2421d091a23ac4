"""What recording costs the generator: generated tokens/s with records off, routing, kept sets, both.

    python benchmarks/capture_overhead.py [--model FOLDER] [--rounds R] [--out FILE.json]

One engine a contender, each in a process of its own, all alive at the same time; they take turns, so that a
machine's moods hit them alike. A turn samples the same prompts with the same seeds, and so the same
responses: 256 of them, 64 at once, cut by top-k 20 and top-p 0.9, at most 96 tokens each. Reported: the
median over rounds, and the median of the ratios to the same round's engine without records.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from common import REPOSITORY, RESULTS, machine_facts, write_json
from rich.console import Console
from rich.table import Table

CONTENDERS = {
    "off": (False, False),
    "routing": (True, False),
    "kept sets": (False, True),
    "both": (True, True),
}
"""(routing, kept sets) by name; the first is the base."""

NUM_PROMPTS, NUM_SAMPLES = 64, 4
MAX_NUM_SEQS = 64
PROMPT_TOKENS, RESPONSE_TOKENS = 30, 96


def serve(pipe: Connection, model: Path, routing: bool, kept_tokens: bool) -> None:
    """Run one engine; for each message, sample once and answer with tokens/s."""
    asyncio.run(_serve(pipe, model, routing, kept_tokens))


async def _serve(pipe: Connection, model: Path, routing: bool, kept_tokens: bool) -> None:
    from forgeasync.config import GeneratorSection, SamplingSection, WeightsSection
    from forgeasync.generator import GeneratorEngine
    from forgeasync.rollouts import Records

    engine = await GeneratorEngine.start(
        model_path=model,
        generator=GeneratorSection(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=2048, kv_cache_gib=0.25),
        max_context_length=PROMPT_TOKENS + RESPONSE_TOKENS,
        seed=0,
        records=Records(routing=routing, kept_tokens=kept_tokens),
        weights=WeightsSection(),
    )
    sampling = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=RESPONSE_TOKENS)
    pipe.send("ready")
    number = 0
    while pipe.recv():
        number += 1
        # New prompts every time: the prefix cache has no part in this.
        rng = np.random.default_rng(number)
        prompts = rng.integers(3, 20, (NUM_PROMPTS, PROMPT_TOKENS)).astype(np.int32)
        start_s = time.perf_counter()
        groups = await asyncio.gather(
            *(
                engine.generate(
                    prompt_ids_P=prompt,
                    num_samples=NUM_SAMPLES,
                    sampling=sampling,
                    seed=number * NUM_PROMPTS + place,
                )
                for place, prompt in enumerate(prompts)
            )
        )
        num_tokens = sum(rollout.num_response_tokens for group in groups for rollout in group)
        pipe.send(num_tokens / (time.perf_counter() - start_s))
    engine.shutdown()


def measure(model: Path, rounds: int) -> dict[str, list[float]]:
    """Tokens/s of every round, by contender."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for name, records in CONTENDERS.items():
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, model, *records), daemon=True)
        process.start()
        processes.append(process)
        assert ours.recv() == "ready"
        pipes[name] = ours
    speeds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(rounds + 1):
        names = list(CONTENDERS)
        # Another order every round.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            pipes[name].send(True)
            speed = pipes[name].recv()
            if number:  # the first round warms up
                speeds[name].append(speed)
    for pipe in pipes.values():
        pipe.send(False)
    for process in processes:
        process.join()
    return speeds


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="What recording costs the generator.")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "tiny_moe")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS / "capture_overhead.json")
    arguments = parser.parse_args()
    speeds = measure(arguments.model, arguments.rounds)
    base = speeds["off"]
    ratios = {
        name: statistics.median(speed / off for speed, off in zip(of_one, base, strict=True))
        for name, of_one in speeds.items()
    }
    table = Table(title=f"generated tokens/s, {MAX_NUM_SEQS} sequences at once")
    for column in ("records", "tokens/s", "ratio to off"):
        table.add_column(column, justify="left" if column == "records" else "right")
    for name, of_one in speeds.items():
        table.add_row(name, f"{statistics.median(of_one):.0f}", f"{ratios[name]:.3f}")
    Console(width=100).print(table)
    write_json(
        arguments.out,
        {"machine": machine_facts(), "tokens_per_s": speeds, "ratio_to_off": ratios},
    )


if __name__ == "__main__":
    main()
