"""How far log-probabilities of a teacher pool are from those of the trainer's own forward pass.

    python benchmarks/teacher_gap.py [--model FOLDER] [--groups N] [--out FILE.json]

A real vLLM engine samples groups in float32, at temperature 1 and at temperature 0.7 with top-p 0.9. A
teacher's engine and the trainer, both with the same weights, then say of the same tokens how likely they are:
over the full vocabulary at temperature 1, as terms of the loss compare them. The trainer has the sequences in
one packed row, with the kept sets of what was sampled; neither side replays the routing of the other.

Reported for each pair of compute dtypes: mean and maximum of abs(trainer - teacher), for the sampled tokens
and for the teacher's 8 likeliest ids at each of them, in nats.
"""

import argparse
import asyncio
import dataclasses
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from common import REPOSITORY, RESULTS, machine_facts, write_json
from mismatch import MAX_CONTEXT, make_sequences, make_trainer, sample
from rich.console import Console
from rich.table import Table

from forgeasync.config import Dtype, GeneratorSection, SamplingSection, WeightsSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import Records, Rollout, TeacherRecord
from forgeasync.trainer import pack_row

SAMPLINGS = {
    "1": SamplingSection(temperature=1.0, max_response_tokens=80),
    "0.7, top-p 0.9": SamplingSection(temperature=0.7, top_p=0.9, max_response_tokens=80),
}
DTYPES = (
    (Dtype.FLOAT32, Dtype.FLOAT32),
    (Dtype.BFLOAT16, Dtype.FLOAT32),
    (Dtype.BFLOAT16, Dtype.BFLOAT16),
)
"""Of the teacher and of the trainer."""
NUM_IDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; gaps are in nats."""

    sampled_at: str
    teacher: str
    trainer: str
    num_tokens: int
    abs_mean: float
    abs_max: float
    topk_abs_mean: float
    topk_abs_max: float


def score(folder: Path, rollouts: Sequence[Rollout], dtype: Dtype) -> list[TeacherRecord]:
    """What a teacher's engine says of rollouts."""
    return asyncio.run(_score(folder, rollouts, dtype))


async def _score(folder: Path, rollouts: Sequence[Rollout], dtype: Dtype) -> list[TeacherRecord]:
    from forgeasync.generator import GeneratorEngine, score_tokens

    engine = await GeneratorEngine.start(
        model_path=folder,
        generator=GeneratorSection(dtype=dtype, max_num_seqs=64, kv_cache_gib=0.25),
        max_context_length=MAX_CONTEXT,
        seed=0,
        records=Records(routing=False, kept_tokens=False),
        weights=WeightsSection(),
        num_scored_ids=NUM_IDS,
    )
    found = await asyncio.gather(
        *(
            score_tokens(
                engine,
                np.concatenate([one.prompt_ids_P, one.response_ids_T]),
                num_prompt=len(one.prompt_ids_P),
                num_ids=NUM_IDS,
            )
            for one in rollouts
        )
    )
    engine.shutdown()
    return list(found)


def gaps_of(
    folder: Path, rollouts: Sequence[Rollout], records: Sequence[TeacherRecord], dtype: Dtype
) -> np.ndarray:
    """Absolute gaps of the sampled tokens, and of the ids that the teacher has named [T, 1 + K]."""
    trainer = make_trainer(folder, read_model_facts(str(folder)), dtype=dtype)
    row = pack_row(
        [
            dataclasses.replace(sequence, expert_ids_SMK=None, teacher=record)
            for sequence, record in zip(make_sequences(rollouts), records, strict=True)
        ]
    )
    assert row.teacher is not None
    asked_TK = np.concatenate([row.target_ids_L[row.mask_L][:, None], row.teacher.ids_TK], axis=1)
    with torch.no_grad():
        predictions = trainer._forward.predictions(row, asked_ids_TK=asked_TK.astype(np.int64))
    assert predictions.asked_TK is not None
    said_TK = np.concatenate([row.teacher.logprobs_T[:, None], row.teacher.topk_TK], axis=1)
    return np.abs(predictions.asked_TK.float().numpy() - said_TK)


def measure(model: Path, num_groups: int) -> list[Row]:
    """All samplings and pairs of dtypes."""
    context = multiprocessing.get_context("spawn")

    def apart(what: object, *arguments: object) -> list[object]:
        # An engine leaves its mark on its process.
        pool: Pool
        with context.Pool(1) as pool:
            return pool.apply(what, arguments)  # type: ignore[arg-type]

    lines: list[Row] = []
    for name, sampling in SAMPLINGS.items():
        rollouts: list[Rollout] = apart(sample, model, num_groups, sampling)  # type: ignore[assignment]
        scored = {dtype: apart(score, model, rollouts, dtype) for dtype in Dtype}
        for of_teacher, in_trainer in DTYPES:
            records: list[TeacherRecord] = scored[of_teacher]  # type: ignore[assignment]
            gaps_TK = gaps_of(model, rollouts, records, in_trainer)
            lines.append(
                Row(
                    sampled_at=name,
                    teacher=of_teacher.value,
                    trainer=in_trainer.value,
                    num_tokens=len(gaps_TK),
                    abs_mean=float(gaps_TK[:, 0].mean()),
                    abs_max=float(gaps_TK[:, 0].max()),
                    topk_abs_mean=float(gaps_TK[:, 1:].mean()),
                    topk_abs_max=float(gaps_TK[:, 1:].max()),
                )
            )
    return lines


def results_table(lines: Sequence[Row]) -> Table:
    """One line a sampling and pair of dtypes."""
    table = Table(title="abs(trainer logprob - teacher logprob), nats")
    texts = ("sampled at", "teacher", "trainer")
    for column in (*texts, "tokens", "mean", "max", f"mean of {NUM_IDS} ids", f"max of {NUM_IDS} ids"):
        table.add_column(column, justify="left" if column in texts else "right")
    for line in lines:
        gaps = (line.abs_mean, line.abs_max, line.topk_abs_mean, line.topk_abs_max)
        table.add_row(
            line.sampled_at,
            line.teacher,
            line.trainer,
            f"{line.num_tokens:,}",
            *(f"{gap:.1e}" for gap in gaps),
            end_section=(line.teacher, line.trainer) == DTYPES[-1],
        )
    return table


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="How far a teacher pool and the trainer are apart.")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "tiny_moe")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS / "teacher_gap.json")
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29547", "RANK": "0", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = measure(arguments.model, arguments.groups)
    dist.destroy_process_group()
    Console(width=120).print(results_table(lines))
    write_json(
        arguments.out, {"machine": machine_facts(), "rows": [dataclasses.asdict(line) for line in lines]}
    )


if __name__ == "__main__":
    main()
