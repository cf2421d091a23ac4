"""vLLM's GPU model runner records what the product's own capture records on CPUs, and what transformers says.

Both runners compute the same model with the same kernels, in float32; sampling and its records are their own
code. Random draws differ by design (counters and hashes on GPUs, generators on CPUs), so distributions are
compared along the same tokens: the GPU's runner takes the CPU's draws, by vLLM's trace replay. Where top_k is
1, both draw for themselves.
"""

import asyncio
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import LoggedTurn, Rollout, check_rollout, group_turns, read_in_flight
from forgeasync.testing import write_tiny_model
from tests.support.engines import (
    RECORDS,
    Expected,
    assert_begins_with,
    assert_logprobs,
    assert_routing,
    expected,
    start_engine,
)
from tests.support.gpu_runner import run_on_gpu_runner
from tests.support.processes import run_alone

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.core import EngineCore

    from forgeasync.generator import GeneratorEngine

GENERATOR = GeneratorSection(
    max_num_seqs=8,
    # Prompts are computed in chunks of at most 48 tokens, and there is room for 5 cache blocks of 128 tokens.
    max_num_batched_tokens=48,
    kv_cache_gib=0.00062,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Groups that are sampled at once."""

    prompts: Sequence[np.ndarray]
    num_samples: int
    sampling: SamplingSection
    drawn: Sequence[Rollout] = ()
    """Rollouts of another engine, whose tokens take the place of this engine's own draws. It computes its
    distributions and draws from them all the same: vLLM's trace replay, which only the GPU's runner has."""


@dataclass(slots=True, kw_only=True)
class Happened:
    """What the engine went through."""

    num_preemptions: int = 0
    num_prefix_hits: int = 0
    num_chunks: int = 0
    """Parts of prompts that were not their last."""
    most_at_once: int = 0
    """Requests in one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    rollouts: dict[str, list[Rollout]]
    """The samples of all prompts, one after another, by the name of their round."""
    logs: dict[str, list[LoggedTurn]] = field(default_factory=dict)
    """The same as they were logged in flight."""
    happened: Happened = field(default_factory=Happened)


async def sample_rounds(folder: Path, rounds: Mapping[str, Round]) -> Sampled:
    """Sample one round after another on one engine of this process."""
    from forgeasync.generator import engine as engine_module

    if any(one.drawn for one in rounds.values()):
        engine_module.AsyncEngineArgs = functools.partial(
            engine_module.AsyncEngineArgs, enable_trace_replay=True
        )
    log = folder.parent / f"in-flight-{os.getpid()}"
    engine = await start_engine(folder, GENERATOR, in_flight=log)
    sampled = Sampled(rollouts={})
    await engine.between_steps(lambda core: _watch(core, sampled.happened))
    for name, one in rounds.items():
        _replay(engine, one)
        groups = await asyncio.gather(
            *(
                engine.generate(
                    prompt_ids_P=prompt,
                    num_samples=one.num_samples,
                    sampling=one.sampling,
                    seed=seed,
                    group_id=seed,
                )
                for seed, prompt in enumerate(one.prompts)
            )
        )
        sampled.rollouts[name] = [rollout for group in groups for rollout in group]
        read = read_in_flight(log, range(len(groups)))
        sampled.logs[name] = [turn for seed in sorted(read.groups) for turn in group_turns(read.groups[seed])]
    engine.shutdown()
    return sampled


def _replay(engine: "GeneratorEngine", one: Round) -> None:
    """Give every request of the round the tokens that were drawn for it, found by its seed."""
    from forgeasync.generator import part_seed

    traces = {}
    for number, rollout in enumerate(one.drawn):
        seed, sample = divmod(number, one.num_samples)
        traces[part_seed(seed, sample=sample, part=0)] = rollout.response_ids_T.tolist()
    run_request = type(engine).run_request

    async def run(prompt_ids: list[int], params: "SamplingParams") -> "RequestOutput":
        params.trace_decode_token_ids = traces.get(params.seed)
        return await run_request(engine, prompt_ids, params)

    engine.run_request = run


def _watch(core: "EngineCore", happened: Happened) -> None:
    scheduler = core.scheduler
    preempt, schedule = scheduler._preempt_request, scheduler.schedule
    find_prefix = scheduler.kv_cache_manager.get_computed_blocks

    def count_preemptions(*arguments: object, **named: object) -> None:
        happened.num_preemptions += 1
        preempt(*arguments, **named)

    def count_hits(request: object) -> object:
        found = find_prefix(request)
        happened.num_prefix_hits += found[1] > 0
        return found

    def count_chunks(*arguments: object) -> object:
        output = schedule(*arguments)
        happened.most_at_once = max(happened.most_at_once, len(output.num_scheduled_tokens))
        for one in output.num_scheduled_tokens:
            # The scheduler has counted the tokens of this step already.
            request = scheduler.requests[one]
            happened.num_chunks += request.num_computed_tokens < request.num_prompt_tokens
        return output

    scheduler._preempt_request = count_preemptions
    scheduler.kv_cache_manager.get_computed_blocks = count_hits
    scheduler.schedule = count_chunks


LOGPROB_TOLERANCE = 1e-4
"""Between the runners. Seen: 1.5e-5; the model's logits are 12 times as wide as usual."""
CUT = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=12)
MIN_P = SamplingSection(temperature=1.3, min_p=0.1, max_response_tokens=8)
UNCUT = SamplingSection(temperature=0.8, max_response_tokens=8)
GREEDY = SamplingSection(top_k=1, max_response_tokens=16)
COMPARED = ("crowd", "min_p", "uncut")
"""Rounds in which the GPU's runner takes the CPU's draws."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "hf", scale=12.0, num_experts=8, top_k=3)


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def make_rounds(vocab_size: int) -> dict[str, Round]:
    """The crowd's long prompts end shortly before a cache block of 128 tokens does, or share one."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, vocab_size, 128)
    prompts = [rng.integers(3, vocab_size, length).astype(np.int32) for length in (3, 71, 122, 124, 126)]
    prompts += [np.append(shared, token).astype(np.int32) for token in (3, 4)]
    few = prompts[:2]
    return {
        "crowd": Round(prompts=prompts, num_samples=2, sampling=CUT),
        "min_p": Round(prompts=few, num_samples=1, sampling=MIN_P),
        "uncut": Round(prompts=few, num_samples=1, sampling=UNCUT),
        "greedy": Round(prompts=few, num_samples=1, sampling=GREEDY),
    }


@pytest.fixture(scope="module")
def on_cpu(folder: Path, reference: torch.nn.Module) -> Sampled:
    return run_alone(sample_rounds, folder, make_rounds(reference.config.vocab_size))


@pytest.fixture(scope="module")
def on_gpu(folder: Path, reference: torch.nn.Module, on_cpu: Sampled) -> Sampled:
    own = make_rounds(reference.config.vocab_size)
    compared = {name: dataclasses.replace(own[name], drawn=on_cpu.rollouts[name]) for name in COMPARED}
    drawn = {"own draws": dataclasses.replace(own["min_p"], sampling=CUT)}
    return run_on_gpu_runner(sample_rounds, folder, own | compared | drawn)


def test_both_engines_were_busy(on_cpu: Sampled, on_gpu: Sampled) -> None:
    for sampled in (on_cpu, on_gpu):
        seen = sampled.happened
        assert seen.num_preemptions > 1 and seen.num_prefix_hits > 2, seen
        assert seen.num_chunks > 10 and seen.most_at_once > 3, seen


@pytest.mark.parametrize("name", [*COMPARED, "greedy"])
def test_records_are_those_of_the_cpu_capture(on_cpu: Sampled, on_gpu: Sampled, name: str) -> None:
    for theirs, ours in zip(on_cpu.rollouts[name], on_gpu.rollouts[name], strict=True):
        np.testing.assert_array_equal(ours.response_ids_T, theirs.response_ids_T)
        np.testing.assert_allclose(ours.logprobs_T, theirs.logprobs_T, rtol=0, atol=LOGPROB_TOLERANCE)
        np.testing.assert_array_equal(
            ours.routed_experts.expert_ids_RMK, theirs.routed_experts.expert_ids_RMK, strict=True
        )
        np.testing.assert_array_equal(
            ours.routed_experts.is_recorded_S, theirs.routed_experts.is_recorded_S, strict=True
        )
        np.testing.assert_array_equal(ours.kept_tokens.offsets, theirs.kept_tokens.offsets)
        np.testing.assert_array_equal(ours.kept_tokens.ids_N, theirs.kept_tokens.ids_N)


@pytest.mark.parametrize("name", ["crowd", "min_p", "uncut"])
def test_the_log_of_tokens_in_flight_has_the_same(on_cpu: Sampled, on_gpu: Sampled, name: str) -> None:
    for sampled in (on_cpu, on_gpu):
        for rollout, turn in zip(sampled.rollouts[name], sampled.logs[name], strict=True):
            assert turn.ended is not None
            assert_begins_with(rollout, turn)


def reference_of(model: torch.nn.Module, rollout: Rollout) -> Expected:
    return expected({0: model}, rollout, recomputed=True)


@pytest.mark.parametrize(
    ("name", "sampling"), [("crowd", CUT), ("own draws", CUT), ("min_p", MIN_P), ("uncut", UNCUT)]
)
def test_records_are_those_of_transformers(
    on_gpu: Sampled, reference: torch.nn.Module, name: str, sampling: SamplingSection
) -> None:
    widths = []
    for rollout in on_gpu.rollouts[name]:
        exact = reference_of(reference, rollout)
        assert_routing(rollout, exact)
        assert_logprobs(rollout, exact, sampling)
        widths += np.diff(rollout.kept_tokens.offsets).tolist()
    if sampling is UNCUT:
        assert set(widths) == {0}, "the whole vocabulary is kept, which is stored as nothing"
    elif name == "crowd":
        assert min(widths) < 4 and max(widths) > 6, "sets of one size would hide mistakes"


def test_greedy_tokens_are_the_most_likely(on_gpu: Sampled, reference: torch.nn.Module) -> None:
    for rollout in on_gpu.rollouts["greedy"]:
        logits_SV = reference_of(reference, rollout).logits_SV[len(rollout.prompt_ids_P) - 1 :]
        np.testing.assert_array_equal(rollout.response_ids_T, logits_SV.argmax(-1).numpy())
        np.testing.assert_array_equal(rollout.kept_tokens.ids_N, rollout.response_ids_T)
        assert not rollout.logprobs_T.any()


def test_every_record_passes_the_check(on_gpu: Sampled, folder: Path) -> None:
    facts = read_model_facts(str(folder))
    for rollouts in on_gpu.rollouts.values():
        for rollout in rollouts:
            check_rollout(rollout, RECORDS, facts)
