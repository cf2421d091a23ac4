"""What the engine records, against transformers: routed experts and kept tokens of real vLLM rollouts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from forgeasync.config import GeneratorSection, ModelFacts, SamplingSection
from forgeasync.rollouts import KeptTokens, RecordError, check_kept_tokens, check_rollout
from tests.generator.conftest import Models, Seen, collected, make_prompts
from tests.support.engines import (
    RECORDS,
    assert_logprobs,
    assert_routing,
    expected,
    sample_all,
    start_engine,
)
from tests.support.processes import run_alone

SAMPLINGS = {
    "cut": SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=26),
    "uncut": SamplingSection(temperature=0.8, max_response_tokens=26),
    "min_p": SamplingSection(temperature=1.3, min_p=0.1, max_response_tokens=26),
}
# Most are longer than a prefill chunk, many end shortly before a cache block of 128 tokens does.
LENGTHS = (3, 9, 33, 60, 71, 112, 116, 120, 122, 126)


async def _sample(folder: Path, vocab_size: int, compile: bool) -> Seen:
    """Rollouts by sampling, under chunked prefill, prefix hits and preemption."""
    # Room for 7 cache blocks, and prefill in chunks of 24 tokens.
    generator = GeneratorSection(
        max_num_seqs=24, max_num_batched_tokens=24, kv_cache_gib=0.0009, compile=compile
    )
    engine = await start_engine(folder, generator)
    scheduler = await engine._client.between_steps(lambda core: core.scheduler)
    preemptions = collected(scheduler, "_preempt_request")
    looked_up = collected(scheduler.kv_cache_manager, "get_computed_blocks")
    prompts = make_prompts(vocab_size, LENGTHS, num_shared=4)
    rollouts = {
        name: await sample_all(engine, prompts, sampling, num_samples=4 if name == "cut" else 1)
        for name, sampling in SAMPLINGS.items()
    }
    engine.shutdown()
    return Seen(
        rollouts=rollouts,
        num_preemptions=len(preemptions),
        num_prefix_hits=sum(answer[1] > 0 for answer in looked_up),
    )


@pytest.fixture(scope="module")
def sampled(folders: list[Path], facts: ModelFacts) -> Seen:
    return run_alone(_sample, folders[0], facts.vocab_size, False)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_records_are_the_forward_passes(sampled: Seen, models: Models, facts: ModelFacts, name: str) -> None:
    assert sampled.num_preemptions > 3 and sampled.num_prefix_hits > 3, "the crowd was no crowd"
    for rollout in sampled.rollouts[name]:
        check_rollout(rollout, RECORDS, facts)
        reference = expected(models, rollout, recomputed=True)
        assert_logprobs(rollout, reference, SAMPLINGS[name])
        assert_routing(rollout, reference)
        assert rollout.routed_experts.expert_ids_RMK.dtype == np.uint8
    widths = np.concatenate([np.diff(one.kept_tokens.offsets) for one in sampled.rollouts[name]])
    if name == "uncut":
        assert not widths.any(), "of everything nothing in particular is kept"
    else:
        assert widths[widths > 0].min() < 4 and widths.max() > 6, "sets of one size would hide mistakes"


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
    check_kept_tokens(kept.slice(2, 5), np.zeros(3, np.int32), vocab_size=5)
    for start in (0, 1):
        with pytest.raises(RecordError, match="no distribution at response token 0"):
            check_kept_tokens(kept.slice(start, 5), np.zeros(5 - start, np.int32), vocab_size=5)


@pytest.mark.exhaustive
def test_a_compiled_engine_records_the_same(folders: list[Path], models: Models, facts: ModelFacts) -> None:
    sampled = run_alone(_sample, folders[0], facts.vocab_size, True)
    for rollout in sampled.rollouts["cut"]:
        assert_routing(rollout, expected(models, rollout, recomputed=True))
