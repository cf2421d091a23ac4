"""What the values of single tokens cost: a step with and without them, and writing tokens.jsonl.

    python benchmarks/token_overhead.py [--model FOLDER] [--rounds R] [--out FILE.json]

One trainer in one process takes turns over the same packed rows, which replay experts and kept sets, with and
without being asked about tokens: the values of 4 rollouts (``logging.rollouts_per_step`` as it is set) and
the worst tokens. Times are processor time, so that other work on the machine counts little.
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import REPOSITORY, RESULTS, machine_facts, write_json
from replay_overhead import TOKENS_PER_ROW, make_rows, own_choices
from tokenizers import Tokenizer

from forgeasync.algorithms import Loss
from forgeasync.config import OptimizerSection, TrainerSection
from forgeasync.models import read_model_facts
from forgeasync.observability import TokenLines
from forgeasync.rollouts import BranchKey, RolloutKey, TokenPieces
from forgeasync.trainer import PackedRow, PlacedSource, PolicyTrainer, Source, TrainerSetup

NUM_RECORDED = 4
NUM_PROMPT_TOKENS = 30
CONTENDERS = ("without", "with")


def sourced(row: PackedRow, row_number: int) -> PackedRow:
    """Return a row that says which rollouts its sequences are; the first row has those that are asked for."""
    starts = [index for index in range(len(row.positions_L)) if row.positions_L[index] == 0]
    ends = [*starts[1:], len(row.positions_L)]
    sources = [
        PlacedSource(
            source=Source(
                key=BranchKey(rollout=RolloutKey(group_id=row_number, episode=episode, agent=0), branch=0),
                is_recorded=row_number == 0 and episode < NUM_RECORDED,
            ),
            start=start,
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            num_response_tokens=end - start - NUM_PROMPT_TOKENS,
        )
        for episode, (start, end) in enumerate(zip(starts, ends, strict=True))
        if row.sequence_ids_L[start] >= 0
    ]
    return dataclasses.replace(row, sources=tuple(sources))


def measure(model: Path, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of every round's step by contender, and of writing its tokens."""
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
    rows = make_rows(facts.vocab_size)
    rows = [dataclasses.replace(row, expert_ids_LMK=own_choices(trainer, row)) for row in rows]
    rows_of = {"without": rows, "with": [sourced(row, number) for number, row in enumerate(rows)]}
    times_s: dict[str, list[float]] = {name: [] for name in (*CONTENDERS, "write")}
    pieces = TokenPieces(Tokenizer.from_file(str(model / "tokenizer.json")))
    with tempfile.TemporaryDirectory() as folder:
        lines = TokenLines(Path(folder) / "tokens.jsonl", pieces)
        for number in range(rounds + 1):
            for name in CONTENDERS if number % 2 else CONTENDERS[::-1]:
                start_s = time.process_time()
                result = trainer.train_step(rows_of[name])
                step_s = time.process_time() - start_s
                if number:  # the first round warms up
                    times_s[name].append(step_s)
                if number and name == "with":
                    assert len(result.tokens.branches) == NUM_RECORDED
                    start_s = time.process_time()
                    lines.prepare(number, result.tokens)
                    lines.write()
                    times_s["write"].append(time.process_time() - start_s)
        lines.close()
    return times_s


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description="What the values of single tokens cost.")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "tiny_moe")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "token_overhead.json")
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29542", "RANK": "0", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times_s = measure(arguments.model, arguments.rounds)
    pairs = zip(times_s["with"], times_s["without"], strict=True)
    figures = {name: statistics.median(values) for name, values in times_s.items()}
    figures["median_ratio"] = statistics.median(one / other for one, other in pairs)
    for name, value in figures.items():
        print(f"{name:14} {value:.5f}")
    write_json(arguments.out, {"machine": machine_facts(), "figures": figures, "seconds": times_s})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
