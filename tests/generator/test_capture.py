"""What the engine records, against transformers: routed experts and kept tokens of real vLLM rollouts."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm.sampling_params import RequestOutputKind, SamplingParams

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.rollouts import (
    KeptTokens,
    RecordError,
    Rollout,
    check_kept_tokens,
    check_rollout,
)
from tests.support.engines import RECORDS, kept_by_definition, let_decode, nothing_to_fetch, start_engine
from tests.support.processes import run_alone

MAX_CONTEXT = 160
MAX_ABORTED = 88
SWAPPED = "model.layers.1.mlp.gate.weight"
SAMPLING = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=26)
UNCUT = SamplingSection(temperature=0.8, max_response_tokens=26)
MIN_P = SamplingSection(temperature=1.3, min_p=0.1, max_response_tokens=26)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    crowd: list[Rollout]
    """Groups under chunked prefill, prefix hits and preemption."""
    uncut: list[Rollout]
    min_p: list[Rollout]
    crossing: list[Rollout]
    """Running while the last layer's gate was replaced."""
    aborted: object
    """vLLM's own output of a request that was cut off."""
    num_preemptions: int
    num_prefix_hits: int


def make_prompts(vocab_size: int) -> list[np.ndarray]:
    """Most are longer than a prefill chunk, many end shortly before a cache block of 128 tokens does, and the
    last four share such a block."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, vocab_size, 128)
    prompts = [rng.integers(3, vocab_size, length) for length in (3, 9, 33, 60, 71, 112, 116, 120, 122, 126)]
    prompts += [np.concatenate([shared, rng.integers(3, vocab_size, 2 + i)]) for i in range(4)]
    return [prompt.astype(np.int32) for prompt in prompts]


async def _sample(folder: Path, vocab_size: int, compile: bool) -> Sampled:
    from tests.support.engines import replace_all_weights

    # Room for 7 cache blocks, and prefill in chunks of 24 tokens.
    generator = GeneratorSection(
        max_num_seqs=24, max_num_batched_tokens=24, kv_cache_gib=0.0009, compile=compile
    )
    engine = await start_engine(folder, generator)
    scheduler = await engine._client.between_steps(lambda core: core.scheduler)
    num_preemptions = 0
    preempt = scheduler._preempt_request

    def count(*args: object, **kwargs: object) -> None:
        nonlocal num_preemptions
        num_preemptions += 1
        preempt(*args, **kwargs)

    scheduler._preempt_request = count
    num_hits = 0
    hits = scheduler.kv_cache_manager.get_computed_blocks

    def count_hits(request: object) -> object:
        nonlocal num_hits
        found = hits(request)
        num_hits += found[1] > 0
        return found

    scheduler.kv_cache_manager.get_computed_blocks = count_hits
    prompts = make_prompts(vocab_size)

    async def groups(sampling: SamplingSection, num_samples: int) -> list[Rollout]:
        sampled = await asyncio.gather(
            *(
                engine.generate(prompt_ids_P=prompt, num_samples=num_samples, sampling=sampling)
                for prompt in prompts
            )
        )
        return [rollout for group in sampled for rollout in group]

    crowd = await groups(SAMPLING, 4)
    uncut = await groups(UNCUT, 1)
    min_p = await groups(MIN_P, 1)
    aborted = await _abort(engine, prompts[4])
    weights = list(swapped_weights(folder).items())
    running = asyncio.create_task(groups(SAMPLING, 1))
    await let_decode(engine, 4)
    await engine.update_weights(
        1, prefetch=nothing_to_fetch, install=lambda core: replace_all_weights(core, weights)
    )
    crossing = await running
    engine.shutdown()
    return Sampled(
        crowd=crowd,
        uncut=uncut,
        min_p=min_p,
        crossing=crossing,
        aborted=aborted,
        num_preemptions=num_preemptions,
        num_prefix_hits=num_hits,
    )


async def _abort(engine: object, prompt: np.ndarray) -> object:
    # Long enough that the request does not end by itself before the engine's thread hears of the abort.
    params = SamplingParams(
        temperature=0.8,
        top_k=20,
        max_tokens=MAX_ABORTED,
        ignore_eos=True,
        logprobs=0,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    last, is_told = None, False
    async for output in engine._llm.generate({"prompt_token_ids": prompt.tolist()}, params, "cut"):
        last = output
        # Outputs of several steps can come as one.
        if len(output.outputs[0].token_ids) >= 7 and not is_told:
            is_told = True
            await engine._llm.abort("cut")
    return last.outputs[0]


def swapped_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Other choices in the last layer only: what is in the KV cache does not depend on them."""
    weights = load_file(folder / "model.safetensors")
    return weights | {SWAPPED: weights[SWAPPED].flip(0).contiguous()}


@pytest.fixture(scope="module")
def folder(folders: list[Path]) -> Path:
    return folders[0]


@pytest.fixture(scope="module")
def reference(models: dict[int, torch.nn.Module]) -> torch.nn.Module:
    return models[0]


@pytest.fixture(scope="module")
def sampled(folder: Path, reference: torch.nn.Module) -> Sampled:
    return run_alone(_sample, folder, reference.config.vocab_size, False)


def exact(model: torch.nn.Module, rollout: Rollout) -> tuple[np.ndarray, torch.Tensor]:
    """Chosen experts [S, M, K] (ascending) and logits [S, V] by transformers."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids_P, rollout.response_ids_T])).long()
    with torch.no_grad():
        out = model(ids[None], output_router_logits=True)
    chosen = [np.sort(logits.topk(model.config.num_experts_per_tok).indices) for logits in out.router_logits]
    return np.stack(chosen, axis=1), out.logits[0]


def assert_routing(model: torch.nn.Module, rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        chosen_SMK, _ = exact(model, rollout)
        record = rollout.routed_experts
        assert record.expert_ids_RMK.dtype == np.uint8
        assert record.is_recorded_S.tolist() == [True] * (len(chosen_SMK) - 1) + [False]
        np.testing.assert_array_equal(record.expert_ids_RMK, chosen_SMK[:-1])


def test_experts_of_every_token_are_those_of_the_forward_pass(
    sampled: Sampled, reference: torch.nn.Module
) -> None:
    assert sampled.num_preemptions > 3 and sampled.num_prefix_hits > 3, "the crowd was no crowd"
    assert_routing(reference, sampled.crowd + sampled.uncut + sampled.min_p)


def test_a_swap_in_mid_sequence_is_in_the_record_to_the_token(
    sampled: Sampled, reference: torch.nn.Module, folder: Path
) -> None:
    swapped = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        gate = swapped.get_parameter(SWAPPED)
        gate.copy_(gate.flip(0))
    num_crossing = 0
    for rollout in sampled.crossing:
        old_SMK, _ = exact(reference, rollout)
        new_SMK, _ = exact(swapped, rollout)
        num_crossing += len(rollout.version_spans) > 1
        rows_RMK = rollout.routed_experts.expert_ids_RMK
        for span in rollout.version_spans:
            # The forward pass that sampled token i had the token before it as its last input.
            first = len(rollout.prompt_ids_P) - 1 + span.start
            rows = slice(first if span.start else 0, first + span.end - span.start)
            expected_SMK = (old_SMK, new_SMK)[span.version]
            if span.start == 0 and len(rollout.prompt_ids_P) > 24:
                # Its prefill came in chunks, which a swap may have parted.
                rows = slice(first, rows.stop)
            np.testing.assert_array_equal(rows_RMK[rows], expected_SMK[rows])
    assert num_crossing, "no sequence was running during the swap"


def test_masks_of_ties_of_everything_and_of_nan() -> None:
    """By hand; top_k 2 of which the second ties, by vLLM's own cut."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    from forgeasync.generator.workarounds.cpu_model_runner import _masks

    logits_BV = torch.tensor([[5.0, 1.0, 3.0, 3.0, 3.0], [5.0, 1.0, 4.0, 3.0, 2.0]])
    logprobs_BV = apply_top_k_top_p(logits_BV, torch.tensor([2, 2]), None).log_softmax(-1)
    no_numbers_BV = torch.full((2, 5), torch.nan)
    no_numbers_BV[1, 3] = 0.0
    masks = _masks(torch.cat([no_numbers_BV, logprobs_BV, torch.full((1, 5), -1.6)]))
    rows = np.split(masks.token_ids, masks.offsets[1:-1])
    assert [row.tolist() for row in rows] == [[-1], [-1], [0, 2, 3, 4], [0, 2], []]
    for others in (slice(0, 0), slice(0, 1), slice(1, 2)):
        # One row with a NaN, or without one, changes no other.
        found = _masks(torch.cat([logprobs_BV, no_numbers_BV[others]]))
        assert found.token_ids.tolist() == [0, 2, 3, 4, 0, 2] + [-1] * (others.stop - others.start)
        assert found.offsets.tolist()[:3] == [0, 4, 6]
    kept = KeptTokens.from_rows(rows, vocab_size=5)
    for start, problem in ((0, "no distribution"), (1, "no distribution"), (2, None)):
        part = kept.slice(start, 5)
        drawn = np.zeros(5 - start, np.int32)
        if problem is None:
            check_kept_tokens(part, drawn, vocab_size=5)
        else:
            with pytest.raises(RecordError, match=f"{problem} at response token 0"):
                check_kept_tokens(part, drawn, vocab_size=5)


@pytest.mark.parametrize(("name", "sampling"), [("crowd", SAMPLING), ("min_p", MIN_P)])
def test_kept_tokens_are_what_could_have_been_drawn(
    sampled: Sampled, reference: torch.nn.Module, name: str, sampling: SamplingSection
) -> None:
    widths = []
    for rollout in getattr(sampled, name):
        _, logits_SV = exact(reference, rollout)
        kept = rollout.kept_tokens
        assert kept.num_tokens == rollout.num_response_tokens
        for index in range(kept.num_tokens):
            row_V = logits_SV[len(rollout.prompt_ids_P) - 1 + index]
            surely, maybe = kept_by_definition(row_V / sampling.temperature, sampling)
            row = set(kept.row(index).tolist()) or set(range(logits_SV.shape[1]))
            assert surely <= row <= maybe
            widths.append(len(row))
    assert min(widths) < 4 and max(widths) > 6, "sets of one size would hide mistakes"


def test_uncut_sampling_keeps_nothing_in_particular(sampled: Sampled) -> None:
    assert all(len(rollout.kept_tokens.ids_N) == 0 for rollout in sampled.uncut)


def test_every_record_passes_the_check(sampled: Sampled, folder: Path) -> None:
    from forgeasync.models import read_model_facts

    facts = read_model_facts(str(folder))
    for rollout in sampled.crowd + sampled.crossing:
        check_rollout(rollout, RECORDS, facts)


def test_an_aborted_request_keeps_the_records_of_its_tokens(sampled: Sampled) -> None:
    completion = sampled.aborted
    assert completion.finish_reason == "abort"
    num_tokens = len(completion.token_ids)
    assert num_tokens >= 7
    assert len(completion.routed_experts) == len(make_prompts(40)[4]) + num_tokens - 1
    assert len(completion.sampling_mask.token_ids) == num_tokens


@pytest.mark.exhaustive
def test_a_compiled_engine_records_the_same(folder: Path, reference: torch.nn.Module) -> None:
    sampled = run_alone(_sample, folder, reference.config.vocab_size, True)
    assert_routing(reference, sampled.crowd)
