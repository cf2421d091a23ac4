"""``fidelity: bitwise``: the trainer's log-probabilities are the generator's, to the last bit.

Engines sample under chunked prefill, prefix hits and preemption, on models of every family that is supported.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forgeasync.config import (
    ActivationCheckpointing,
    GeneratorSection,
    ParallelSection,
    SamplingSection,
    TrainerSection,
)
from forgeasync.models import read_model_facts
from forgeasync.rollouts import NO_RECORD, CaptureSpec, OperatorTrace, Rollout
from forgeasync.trainer import MismatchTooLarge, PackedRow, PolicyTrainer, TrainingSequence, pack_row
from tests.generator.conftest import collected, make_prompts
from tests.support.engines import sample_all, start_engine
from tests.support.families import write_family
from tests.support.processes import run_alone, run_ranks
from tests.support.trainers import LARGE_STEP, make_setup, make_trainer

if TYPE_CHECKING:
    from forgeasync.generator import GeneratorEngine

LENGTHS = (3, 9, 33, 60, 71, 112, 116, 120)
SAMPLING = SamplingSection(temperature=0.8, top_k=9, top_p=0.95, max_response_tokens=40)
WHOLE = SamplingSection(max_response_tokens=40)
"""Keeps the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Groups of four, and what the engine did meanwhile."""

    rollouts: list[Rollout]
    num_preemptions: int
    num_prefix_hits: int


async def _start(folder: Path, sampling: SamplingSection) -> "GeneratorEngine":
    # Room for 7 cache blocks, and prefill in chunks of 24 tokens.
    generator = GeneratorSection(
        max_num_seqs=24, max_num_batched_tokens=24, kv_cache_gib=0.0009, batch_invariant=True
    )
    has_experts = read_model_facts(str(folder)).num_experts > 0
    records = CaptureSpec(routing=has_experts, kept_tokens=sampling.top_k > 0)
    return await start_engine(folder, generator, records=records)


async def _sample(folder: Path, sampling: SamplingSection) -> Sampled:
    engine = await _start(folder, sampling)
    scheduler = await engine._client.between_steps(lambda core: core.scheduler)
    preemptions = collected(scheduler, "_preempt_request")
    looked_up = collected(scheduler.kv_cache_manager, "get_computed_blocks")
    prompts = make_prompts(engine.vocab_size, LENGTHS, num_shared=4)
    rollouts = await sample_all(engine, prompts, sampling, num_samples=4)
    engine.shutdown()
    return Sampled(
        rollouts=rollouts,
        num_preemptions=len(preemptions),
        num_prefix_hits=sum(answer[1] > 0 for answer in looked_up),
    )


def _sequence(rollout: Rollout, advantage: float) -> TrainingSequence:
    expert_ids_SMK = None
    if rollout.routed_experts is not None:
        recorded = rollout.routed_experts.expert_ids_RMK.astype(np.int16)
        num_missing = len(rollout.prompt_ids_P) + len(rollout.response_ids_T) - len(recorded)
        expert_ids_SMK = np.pad(recorded, ((0, num_missing), (0, 0), (0, 0)), constant_values=NO_RECORD)
    return TrainingSequence(
        prompt_ids_P=rollout.prompt_ids_P,
        response_ids_T=rollout.response_ids_T,
        behavior_logprobs_T=rollout.logprobs_T,
        ages_T=np.zeros(len(rollout.response_ids_T), np.int32),
        advantage=advantage,
        expert_ids_SMK=expert_ids_SMK,
        kept_tokens=rollout.kept_tokens,
    )


def _rows(
    rollouts: list[Rollout], *, share: bool, per_row: int, rank: int, num_ranks: int
) -> list[PackedRow]:
    sequences = [_sequence(one, (-1.0) ** index) for index, one in enumerate(rollouts)]
    rows = [
        pack_row(sequences[first : first + per_row], share_prefixes=share)
        for first in range(0, len(sequences), per_row)
    ]
    return rows[rank::num_ranks]


def _step(
    folder: Path, rollouts: list[Rollout], temperature: float, share: bool, per_row: int, is_bitwise: bool
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """A step's metrics and the weights after it."""
    world_size = torch.distributed.get_world_size()
    trainer = make_trainer(
        folder,
        ParallelSection(num_procs=world_size),
        tokens_per_row=2048,
        share_prefixes=share,
        # Recomputed layers are those of the trainer.
        activation_checkpointing=ActivationCheckpointing.NONE if share else ActivationCheckpointing.FULL,
        temperature=temperature,
        is_bitwise=is_bitwise,
    )
    rank = torch.distributed.get_rank()
    rows = _rows(rollouts, share=share, per_row=per_row, rank=rank, num_ranks=world_size)
    metrics = trainer.train_step(rows).metrics
    return metrics, {name: weight.full_tensor() for name, weight in trainer.model.named_parameters()}


def _steps(folder: Path, rollouts: list[Rollout], temperature: float, share: bool, per_row: int) -> tuple:
    return tuple(_step(folder, rollouts, temperature, share, per_row, bitwise) for bitwise in (True, False))


@pytest.mark.parametrize(
    ("variant", "sampling"),
    [
        ("qwen3_moe", SAMPLING),
        *(
            pytest.param(variant, sampling, marks=pytest.mark.exhaustive)
            for variant, sampling in (
                ("qwen3_moe", WHOLE),
                ("qwen3", SAMPLING),
                ("qwen3_tied", WHOLE),
                ("llama", SAMPLING),
                ("llama3_rope", SAMPLING),
            )
        ),
    ],
)
def test_log_probabilities_are_those_of_the_generator(
    tmp_path: Path, variant: str, sampling: SamplingSection
) -> None:
    folder = write_family(tmp_path / "model", variant)
    sampled = run_alone(_sample, folder, sampling)
    assert sampled.num_preemptions > 3 and sampled.num_prefix_hits > 3, "the crowd was no crowd"
    for num_ranks, share, per_row in ((1, True, 8), (2, False, 3)):
        steps = run_ranks(num_ranks, _steps, folder, sampled.rollouts, sampling.temperature, share, per_row)
        for (metrics, weights), (plain, plain_weights) in steps:
            assert metrics["mismatch/logprob_abs_max"] == 0.0
            assert plain["mismatch/logprob_abs_max"] > 0.0, "the option has become needless"
            assert metrics["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, plain_weights[name], rtol=1e-4, atol=1e-6)


def _step_on_changed(folder: Path, rollouts: list[Rollout], index: int) -> str:
    """What is said of the first log-probability of a rollout in its next representable number."""
    rollout = rollouts[index]
    rollout.logprobs_T[0] = np.nextafter(rollout.logprobs_T[0], np.float32(-np.inf))
    with pytest.raises(MismatchTooLarge) as refused:
        _step(folder, rollouts, SAMPLING.temperature, share=True, per_row=8, is_bitwise=True)
    return str(refused.value)


def test_a_wrong_last_bit_ends_the_step_on_every_rank(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "qwen3_moe")
    rollouts = run_alone(_sample, folder, SAMPLING).rollouts
    # It is in the second row, which is the other rank's.
    told, of_other = run_ranks(2, _step_on_changed, folder, rollouts, 9)
    assert told == of_other
    changed = rollouts[9]
    place = f"token {changed.response_ids_T[0]} at position {len(changed.prompt_ids_P)} of sequence"
    assert place in told and "of row 0 on trainer rank 1" in told, told
    assert "1 tokens of the row differ; the step was not made" in told


def _change_weight(trainer: PolicyTrainer, layer: str, weight: str) -> None:
    """Change the last bit of every 50th element."""
    changed = trainer.model.layers[layer].get_parameter(weight).to_local().data
    changed[:, ::50] = changed[:, ::50].nextafter(torch.tensor(torch.inf))


def _change_operator(name: str, nth: int) -> None:
    """Change the last bit of what every second call of a kernel writes, from the ``nth`` one on."""
    ops = sys.modules["vllm._custom_ops"]
    kernel, calls = getattr(ops, name), []

    def changed(out: torch.Tensor, *arguments: object) -> None:
        kernel(out, *arguments)
        calls.append(name)
        if len(calls) % 2 == nth:
            out.copy_(out.nextafter(torch.tensor(torch.inf)))

    setattr(ops, name, changed)


def _change_o_proj(trainer: PolicyTrainer, _: list[Rollout]) -> None:
    _change_weight(trainer, "0", "attention.wo.weight")


def _change_down_proj(trainer: PolicyTrainer, _: list[Rollout]) -> None:
    _change_weight(trainer, "1", "feed_forward.w2.weight")


def _change_head(trainer: PolicyTrainer, _: list[Rollout]) -> None:
    weight = trainer.model.lm_head.weight.to_local().data
    weight.copy_(weight.nextafter(torch.tensor(torch.inf)))


def _change_experts(_: PolicyTrainer, rollouts: list[Rollout]) -> None:
    """In layer 1, on the last rank alone."""
    if dist.get_rank() == dist.get_world_size() - 1:
        _change_operator("cpu_fused_moe", 0)


def _change_record(_: PolicyTrainer, rollouts: list[Rollout]) -> None:
    logprobs_T = rollouts[9].logprobs_T
    logprobs_T[3] = np.nextafter(logprobs_T[3], np.float32(-np.inf))


Change = Callable[[PolicyTrainer, list[Rollout]], None]


def _trace(folder: Path, rollouts: list[Rollout], change: Change, traces: Path) -> str:
    """Step with something changed, and return the error."""
    num_ranks = dist.get_world_size()
    parallel = ParallelSection(num_procs=num_ranks)
    section = TrainerSection(parallel=parallel, optimizer=LARGE_STEP, tokens_per_row=2048)
    setup = make_setup(folder, section, temperature=SAMPLING.temperature, is_bitwise=True, bad_steps=traces)
    trainer = PolicyTrainer(setup)
    change(trainer, rollouts)
    rows = _rows(rollouts, share=num_ranks == 1, per_row=4, rank=dist.get_rank(), num_ranks=num_ranks)
    with pytest.raises(MismatchTooLarge) as refused:
        trainer.train_step(rows)
    return str(refused.value)


async def _first_different_operators(folder: Path, files: Sequence[Path]) -> list[str]:
    """What a busy engine says of traces."""
    engine = await _start(folder, SAMPLING)
    prompts = make_prompts(engine.vocab_size, LENGTHS, num_shared=4)
    busy = asyncio.create_task(sample_all(engine, prompts, SAMPLING, num_samples=2))
    await asyncio.sleep(0)
    said = [await engine.first_different_operator(file) for file in files]
    # Requests that made room for the comparison have gone on.
    assert all(one.num_response_tokens for one in await busy)
    await engine.between_steps(lambda core: core.set_weight_version("1"))
    with pytest.raises(ValueError, match="version"):
        await engine.first_different_operator(files[0])
    engine.shutdown()
    return said


ALL_EQUAL = "none of {} operators differs"


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        (
            "qwen3_moe",
            {
                _change_experts: "the first operator that differs is model.layers.1.mlp.experts ",
                _change_o_proj: "the first operator that differs is model.layers.0.self_attn.o_proj ",
                _change_head: "the first operator that differs is lm_head ",
                _change_record: ALL_EQUAL.format(3 + 2 * 10),
            },
        ),
        pytest.param(
            "llama",
            {
                _change_down_proj: "the first operator that differs is model.layers.1.mlp.down_proj ",
                _change_record: ALL_EQUAL.format(3 + 2 * 9),
            },
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_first_operator_that_differs_is_named(
    tmp_path: Path, variant: str, changes: dict[Change, str]
) -> None:
    folder = write_family(tmp_path / "model", variant)
    rollouts = run_alone(_sample, folder, SAMPLING).rollouts
    files = []
    for number, change in enumerate(changes):
        traces = tmp_path / f"traces-{number}"
        num_ranks = 2 if change is _change_experts else 1
        errors = set(run_ranks(num_ranks, _trace, folder, rollouts, change, traces))
        assert len(errors) == 1 and "fidelity = 'bitwise'" in errors.pop()
        (file,) = traces.iterdir()
        assert file == OperatorTrace.file(traces, 0)
        files.append(file)
    for found, expected in zip(
        run_alone(_first_different_operators, folder, files), changes.values(), strict=True
    ):
        assert found.startswith(expected), found
