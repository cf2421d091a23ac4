"""What shared prefixes save in a trainer's step, against separate rows of the same sequences.

    [CUDA_VISIBLE_DEVICES=] python benchmarks/prefix_sharing.py [--rounds 5] [--json FILE]

Each round takes a step with shared and one with separate rows, each in the trainer of a run with that option.
Its ratio is that of the first to the second; the table has the median over the rounds:

- one row, computed: computed tokens to tokens of the sequences, if one row had them all, and in the rows here
- ideal: products of the layers for each computed token, of the output layer for each target, and of attention
  for each pair of tokens
- time: forward and backward passes with the gradients' norm; of ideal: ideal to that
- separate: seconds of the passes over separate rows
- peak: memory that the forward pass of the largest row adds, separate > shared; on GPUs
- difference: the largest relative one of the loss and the gradients of single parameters
- rounding: the same of separate rows of half the length

Recorded experts are random, and the learning rate changes no weight. On a GPU the models are two layers of
Qwen3-30B-A3B and eight of Qwen3-0.6B, in bfloat16 with fewer token ids; on a CPU, two tiny layers with
experts, in float32 on one core. Neither vLLM nor a checkpoint is needed.
"""

import argparse
import dataclasses
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine_facts, one_rank_trainer, watched_step, write_json
from gpu_probe import child_environment
from gpu_probe_common import Device, plain, trainer_process

from forgeasync.config import ModelFacts
from forgeasync.models import DEVICE_TYPE, SHIPPED_MODELS, read_model_facts
from forgeasync.planning import count_parameters
from forgeasync.rollouts import plan_rows
from forgeasync.trainer import PackedRow, PolicyTrainer, TrainingSequence, pack_row

TINY = {
    **{"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 512},
    **{"num_experts": 8, "top_k": 2, "expert_hidden_size": 64, "num_layers": 2},
}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "Qwen3-30B-A3B": {"num_layers": 2, "vocab_size": 8192},
        "Qwen3-0.6B": {"num_layers": 8, "num_dense_layers": 8, "vocab_size": 32768},
    },
    "cpu": {"Qwen3-30B-A3B": TINY},
}
"""Changes of some values of shipped configs, by device and name. The vocabularies keep the share of the
output layer in the whole model's products."""
TEXT = (64, 320)
"""Fewest and most tokens between two turns, which are not sampled."""
TOKENS_PER_ROW = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Groups of episodes with one prompt. Those of several turns have two branches, which part halfway."""

    num_groups: Mapping[str, int]
    """By device."""
    group_size: int
    num_prompt: int
    response: tuple[int, int]
    """Fewest and most sampled tokens of a turn."""
    num_turns: int = 1


WORKS = {
    "prompts of 512": Work(
        num_groups={"cuda": 8, "cpu": 1}, group_size=8, num_prompt=512, response=(64, 256)
    ),
    "agents' branches": Work(
        num_groups={"cuda": 4, "cpu": 1}, group_size=2, num_prompt=256, response=(64, 192), num_turns=12
    ),
    "prompts of 8": Work(num_groups={"cuda": 16, "cpu": 2}, group_size=8, num_prompt=8, response=(64, 256)),
}
Rows = Sequence[PackedRow]
Part = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Token ids, recorded experts, and whether tokens are sampled."""


def make_groups(work: Work, facts: ModelFacts, num_groups: int) -> list[list[TrainingSequence]]:
    """Make random sequences; tokens that two of a group share have the same recorded experts."""
    rng = np.random.default_rng(0)

    def tokens(num: int, is_sampled: bool) -> Part:
        ids = rng.integers(0, facts.vocab_size, num).astype(np.int32)
        order = rng.random((num, facts.num_moe_layers, facts.num_experts), np.float32).argsort(-1)
        return ids, order[..., : facts.top_k].astype(np.int16), np.full(num, is_sampled)

    def turns(num: int) -> list[Part]:
        ranges = [work.response, TEXT] * num
        return [tokens(int(rng.integers(*one, endpoint=True)), one is not TEXT) for one in ranges[:-1]]

    def sequence(parts: Sequence[Part]) -> TrainingSequence:
        ids, experts_SMK, is_sampled = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        num_response = len(ids) - work.num_prompt
        return TrainingSequence(
            prompt_ids_P=ids[: work.num_prompt],
            response_ids_T=ids[work.num_prompt :],
            behavior_logprobs_T=np.full(num_response, -np.log(facts.vocab_size), np.float32),
            ages_T=np.zeros(num_response, np.int32),
            advantage=float(rng.uniform(0.5, 1.5)),
            expert_ids_SMK=experts_SMK if facts.num_experts else None,
            is_sampled_T=is_sampled[work.num_prompt :],
        )

    groups = []
    for _ in range(num_groups):
        prompt, group = tokens(work.num_prompt, False), []
        for _ in range(work.group_size):
            episode = turns(work.num_turns)
            group.append(sequence([prompt, *episode]))
            if work.num_turns > 1:
                # Tokens that both branches have are targets in one of them.
                common = [(*part[:2], np.zeros_like(part[2])) for part in episode[: work.num_turns]]
                group.append(sequence([prompt, *common, *turns(work.num_turns // 2)]))
        groups.append(group)
    return groups


def make_rows(
    groups: Sequence[Sequence[TrainingSequence]], *, share: bool, tokens_per_row: int = TOKENS_PER_ROW
) -> list[PackedRow]:
    """Pack groups as the trainer of a run does."""
    sequences = [one for group in groups for one in group]
    lengths = [one.num_tokens for one in sequences]
    prefixes = []
    for number, group in enumerate(groups):
        for index, one in enumerate(group):
            # The second branch of an episode samples nothing that both have.
            prompt, common = len(one.prompt_ids_P), int(group[index | 1].is_sampled_T.argmax())
            prefixes.append([(number, prompt), ((number, index // 2), prompt + common)])
    known = prefixes if share else None
    plan = plan_rows(lengths, tokens_per_row=tokens_per_row, num_ranks=1, prefixes=known)
    return [pack_row([sequences[index] for index in row], share_prefixes=share) for (row,) in plan]


def num_computed(rows: Rows) -> int:
    """Return the number of tokens that rows have, without padding."""
    return sum(int((row.num_uses_L > 0).sum()) for row in rows)


def products(rows: Rows, facts: ModelFacts) -> float:
    """Return the multiplications of a forward pass, without padding."""
    counts = count_parameters(facts)
    of_experts = counts.experts * facts.top_k / max(1, facts.num_experts)
    num_pairs = sum(int((row.positions_L + 1)[row.num_uses_L > 0].sum()) for row in rows)
    of_pair = 2 * facts.num_layers * facts.num_heads * facts.head_dim
    of_layers = num_computed(rows) * (of_experts + counts.in_layers + counts.replicated)
    return of_layers + num_pairs * of_pair + counts.vocabulary * sum(row.num_targets for row in rows)


def forward_peak_gib(trainer: PolicyTrainer, rows: Rows, device: Device) -> float | None:
    """Return the memory that the forward pass of the largest row adds; None without a GPU."""
    row = max(rows, key=lambda one: len(one.token_ids_L))
    found: list[torch.Tensor] = []
    peak = device.measure_peak(lambda: found.append(trainer.logprobs(row)))
    found[0].sum().backward()
    trainer.model.zero_grad()
    return peak


def differences(trainers: Sequence[PolicyTrainer], rows: Sequence[Rows], short: Rows) -> dict[str, float]:
    """Return how far steps with shared rows and with ``short`` ones are from one with separate rows."""
    expected, gradients, _ = watched_step(trainers[0], rows[0])
    norm = torch.linalg.vector_norm

    def largest(trainer: PolicyTrainer, of_step: Rows) -> float:
        result, others, _ = watched_step(trainer, of_step)
        pairs = zip(others, gradients, strict=True)
        loss = abs(result.metrics["loss"] / expected.metrics["loss"] - 1.0)
        return max(loss, *(float(norm(one - other) / norm(other)) for one, other in pairs))

    return {"difference": largest(trainers[1], rows[1]), "rounding": largest(trainers[0], short)}


def compare(
    trainers: Sequence[PolicyTrainer], facts: ModelFacts, work: Work, device: Device, num_rounds: int
) -> dict[str, Any]:
    """Return the figures of one work. The first trainer has separate rows, the second one shared ones."""
    groups = make_groups(work, facts, work.num_groups[device.kind])
    separate, shared = rows = [make_rows(groups, share=share) for share in (False, True)]
    one_row = make_rows([[one for group in groups for one in group]], share=True, tokens_per_row=2**31)
    short = make_rows(groups, share=False, tokens_per_row=TOKENS_PER_ROW // 2)
    # Also warms up.
    errors = differences(trainers, rows, short)
    times_s: tuple[list[float], list[float]] = ([], [])
    for number in range(num_rounds):
        for which in (1 - number % 2, number % 2):
            device.synchronize()
            times_s[which].append(watched_step(trainers[which], rows[which])[2])
    ideal = products(shared, facts) / products(separate, facts)
    ratio = statistics.median(other / one for one, other in zip(*times_s, strict=True))
    peaks = [forward_peak_gib(*pair, device) for pair in zip(trainers, rows, strict=True)]
    num_tokens = num_computed(separate)
    return {
        "rows": f"{len(separate)} > {len(shared)}",
        "tokens": num_tokens,
        "one row": num_computed(one_row) / num_tokens,
        "computed": num_computed(shared) / num_tokens,
        "ideal": ideal,
        "time": ratio,
        "of ideal": ideal / ratio,
        "separate s": statistics.median(times_s[0]),
        "peak GiB": "-" if peaks[0] is None else " > ".join(f"{peak:.2f}" for peak in peaks),
        **errors,
    }


def print_line(cells: Iterable[object]) -> None:
    """Print a line of the table."""
    texts = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print("".join(f"{text:<17}" if at < 2 else f"{text:>11}" for at, text in enumerate(texts)), flush=True)


def measure(device: Device, file: Path | None, num_rounds: int) -> None:
    """Compare all works with all models; print and write each result at once."""
    machine = machine_facts() | {"torch": torch.__version__}
    if device.is_gpu:
        machine["gpu"] = torch.cuda.get_device_properties(0).name
    print(machine, flush=True)
    results: list[dict[str, Any]] = []
    for model, changes in MODELS[device.kind].items():
        facts = dataclasses.replace(read_model_facts(str(SHIPPED_MODELS / f"Qwen--{model}")), **changes)
        options = {"dtype": "bfloat16" if device.is_gpu else "float32", "tokens_per_row": TOKENS_PER_ROW}
        trainers = [one_rank_trainer(facts, share_prefixes=share, **options) for share in (False, True)]
        for name, work in WORKS.items():
            found = compare(trainers, facts, work, device, num_rounds)
            results.append({"model": model, "work": name, **found})
            if len(results) == 1:
                print_line(results[0])
            print_line(results[-1].values())
            if file is not None:
                write_json(file, plain({"machine": machine, "results": results}))
        # Before those of the next model.
        del trainers


def main() -> None:
    """Parse the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ |= child_environment(DEVICE_TYPE)
    if DEVICE_TYPE == "cpu":
        torch.set_num_threads(1)
    with trainer_process():
        measure(Device(DEVICE_TYPE), arguments.json, arguments.rounds)


if __name__ == "__main__":
    main()
