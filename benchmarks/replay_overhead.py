"""What replaying costs the trainer: time of a step with replay off, routing, kept sets, both.

    python benchmarks/replay_overhead.py [--model FOLDER] [--rounds R] [--out FILE.json]

One trainer in one process takes turns over the same packed rows, with and without their records. Sequences
have the embedded default's lengths; recorded experts are the model's own choices, so that every contender
gives the experts the same work; kept sets have up to 20 tokens.
"""

import argparse
import dataclasses
import os
import statistics
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from common import REPOSITORY, RESULTS, machine_facts, write_json
from rich.console import Console
from rich.table import Table

from forgeasync.algorithms import Loss
from forgeasync.config import OptimizerSection, TrainerSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import KeptTokens, all_kept
from forgeasync.trainer import (
    PackedRow,
    PolicyTrainer,
    TrainerSetup,
    TrainingSequence,
    pack_rows,
    replay_routers,
)

CONTENDERS = ("off", "routing", "kept sets", "both")
TOKENS_PER_ROW = 4096
NUM_SEQUENCES = 96
LARGEST_SET = 20


def make_rows(vocab_size: int) -> list[PackedRow]:
    """Long-tailed responses with kept sets."""
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(NUM_SEQUENCES):
        length = int(np.clip(rng.lognormal(3.3, 0.9), 3, 120))
        response = rng.integers(0, vocab_size, length).astype(np.int32)
        kept = [
            sorted({int(token), *rng.integers(0, vocab_size, rng.integers(0, LARGEST_SET)).tolist()})
            for token in response
        ]
        sequences.append(
            TrainingSequence(
                prompt_ids_P=rng.integers(0, vocab_size, 30).astype(np.int32),
                response_ids_T=response,
                behavior_logprobs_T=np.full(length, -2.0, np.float32),
                ages_T=np.zeros(length, np.int32),
                advantage=float(rng.standard_normal()),
                kept_tokens=KeptTokens.from_rows(kept, vocab_size=vocab_size),
            )
        )
    return pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=1)[0]


def own_choices(trainer: PolicyTrainer, row: PackedRow) -> np.ndarray:
    """Return the experts that the routers choose by themselves: int16 [L, M, K]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, outputs: chosen.append(outputs[1][0]))
        for router in replay_routers(trainer.model)
    ]
    with torch.no_grad():
        trainer.logprobs(row)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).numpy().astype(np.int16)


def measure(model: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round's step, by contender."""
    facts = read_model_facts(str(model))
    setup = TrainerSetup(
        section=TrainerSection(
            tokens_per_row=TOKENS_PER_ROW,
            replay_probe_share=0.0,
            optimizer=OptimizerSection(learning_rate=1e-12),
        ),
        facts=facts,
        temperature=1.0,
        loss=Loss(),
        seed=0,
        checkpoint=model,
    )
    trainer = PolicyTrainer(setup)
    with_sets = make_rows(facts.vocab_size)
    without = [dataclasses.replace(row, kept_tokens=all_kept(row.num_targets)) for row in with_sets]
    choices = [own_choices(trainer, row) for row in with_sets]

    def routed(rows: list[PackedRow]) -> list[PackedRow]:
        return [dataclasses.replace(row, expert_ids_LMK=ids) for row, ids in zip(rows, choices, strict=True)]

    rows_of = dict(zip(CONTENDERS, (without, routed(without), with_sets, routed(with_sets)), strict=True))
    times_s: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(rounds + 1):
        start = number % len(CONTENDERS)
        for name in CONTENDERS[start:] + CONTENDERS[:start]:
            step_s = trainer.train_step(rows_of[name]).train_s
            if number:  # the first round warms up
                times_s[name].append(step_s)
    return times_s


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="What replaying costs the trainer.")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "tiny_moe")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS / "replay_overhead.json")
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541", "RANK": "0", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times_s = measure(arguments.model, arguments.rounds)
    dist.destroy_process_group()
    ratios = {
        name: statistics.median(own / off for own, off in zip(of_one, times_s["off"], strict=True))
        for name, of_one in times_s.items()
    }
    table = Table(title="time of a trainer step")
    for column in ("replay", "step s", "ratio to off"):
        table.add_column(column, justify="left" if column == "replay" else "right")
    for name, of_one in times_s.items():
        table.add_row(name, f"{statistics.median(of_one):.3f}", f"{ratios[name]:.3f}")
    Console(width=100).print(table)
    write_json(arguments.out, {"machine": machine_facts(), "step_s": times_s, "ratio_to_off": ratios})


if __name__ == "__main__":
    main()
