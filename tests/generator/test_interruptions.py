"""Updates under running sequences, in every mode of interruption and of the KV cache, with real engines.

One process runs all scenarios of a mode, each on engines of its own; the tests look at what came out.
References are transformers models of the same weights, and weights that make a token's version visible in it.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from forgeasync.config import (
    GeneratorSection,
    Interruption,
    KvAfterSwap,
    ModelFacts,
    SamplingSection,
    WeightsSection,
)
from forgeasync.rollouts import FinishReason, Rollout, check_rollout
from tests.generator.conftest import Models, Seen, collected, make_prompts
from tests.support.engines import (
    RECORDS,
    ask,
    assert_logprobs,
    assert_routing,
    expected,
    installer,
    let_decode,
    nothing_to_fetch,
    num_output_tokens,
    revealing_weights,
    sample_all,
    schedule_asynchronously,
    start_engine,
    update,
)
from tests.support.processes import run_alone

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from forgeasync.generator import GeneratorEngine, SwapReport

SAMPLING = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=26)
AMPLE = GeneratorSection(max_num_seqs=32, max_num_batched_tokens=2048, kv_cache_gib=0.05)
# Room for 11 blocks of 128 tokens, and prefill in chunks: requests wait and are preempted.
SCARCE = GeneratorSection(max_num_seqs=16, max_num_batched_tokens=48, kv_cache_gib=0.0014)
FIRST_REVEALED, NUM_REVEALED = 3, 12
"""Weights that reveal version v make token v certain; 0 to 2 are special tokens."""

LENGTHS = (3, 9, 33, 60, 112, 116, 120, 122)
"""Some prompts end shortly before a cache block of 128 tokens does."""

RECOMPUTE = KvAfterSwap.RECOMPUTE
VARIANTS = {
    "in_flight": WeightsSection(),
    "in_flight_recompute": WeightsSection(kv_cache=RECOMPUTE),
    "blocking": WeightsSection(interruption=Interruption.BLOCKING),
    "blocking_recompute": WeightsSection(interruption=Interruption.BLOCKING, kv_cache=RECOMPUTE),
    "drain": WeightsSection(interruption=Interruption.DRAIN),
    "abort_and_resume": WeightsSection(interruption=Interruption.ABORT_AND_RESUME),
    "cancel_stale": WeightsSection(interruption=Interruption.CANCEL_STALE),
    "in_flight_queued": WeightsSection(),
    "abort_and_resume_queued": WeightsSection(interruption=Interruption.ABORT_AND_RESUME),
    "blocking_queued_recompute": WeightsSection(interruption=Interruption.BLOCKING, kv_cache=RECOMPUTE),
    "sleep": WeightsSection(kv_cache=RECOMPUTE),
    "sleep_queued": WeightsSection(kv_cache=RECOMPUTE),
}
"""``queued``: with asynchronous scheduling, as on GPUs. ``sleep``: updates arrive while the engine sleeps."""
EXHAUSTIVE = (
    "in_flight_recompute",
    "blocking",
    "abort_and_resume_queued",
    "blocking_queued_recompute",
    "sleep",
)
"""Each is half of another variant."""
KEEPS_OLD_CONTEXT = ("in_flight", "blocking", "cancel_stale", "in_flight_queued")
"""After a swap these attend to keys and values of older weights."""


class FetchFailed(RuntimeError):
    """What the tests' transport raises."""


async def _observe(folders: list[Path], vocab_size: int, name: str) -> Seen:
    seen = Seen()
    prompts = make_prompts(vocab_size, LENGTHS, num_shared=2)
    weights, keeps = VARIANTS[name], name in KEEPS_OLD_CONTEXT
    if "queued" in name:
        schedule_asynchronously()
    # A preempted request under KEEP attends to a mixture that no reference knows: ample memory for those.
    engine = await start_engine(folders[0], AMPLE if keeps else SCARCE, weights)
    sleeps = "sleep" in name
    await _cross(seen, engine, folders, prompts, sleeps=sleeps)
    engine.shutdown()
    engine = await start_engine(folders[0], SCARCE, weights)
    scheduler = await engine._client.between_steps(lambda core: core.scheduler)
    preemptions = collected(scheduler, "_preempt_request")
    await _fail(seen, engine, prompts, stands_still=weights.interruption is Interruption.BLOCKING)
    seen.idle = await update(engine, 1, load_file(folders[1] / "model.safetensors"))
    seen.revealed = await _reveal(engine, folders[0], prompts, sleeps=sleeps)
    seen.num_preemptions = len(preemptions)
    engine.shutdown()
    return seen


def _lose_memory_asleep(core: "EngineCore") -> None:
    """Have the engine's worker lose weights and KV cache while it sleeps, as on GPUs."""

    def sleep(self: Any, level: int = 1) -> None:
        assert level == 1
        tensors = [parameter.data for parameter in self.model_runner.get_model().parameters()]
        self.saved = [(tensor, tensor.clone()) for tensor in tensors]
        for tensor in tensors:
            tensor.fill_(float("nan"))
        for cache in self.model_runner.kv_caches:
            cache.fill_(7.0)

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        assert tags is None
        for tensor, saved in self.saved:
            tensor.copy_(saved)

    worker = type(core.model_executor.driver_worker.worker)
    worker.sleep, worker.wake_up = sleep, wake_up


async def _update_asleep(
    seen: Seen, engine: "GeneratorEngine", arrive: Callable[[], Awaitable["SwapReport"]]
) -> "SwapReport":
    """An update that arrives while the engine sleeps waits until it wakes."""
    await ask(engine, _lose_memory_asleep)
    await engine.sleep()
    before = await ask(engine, num_output_tokens)
    arriving = asyncio.create_task(arrive())
    # The fetch takes 0.02 s. Nothing else shows that nothing happens.
    await asyncio.sleep(0.1)
    seen.tokens_asleep = [before, await ask(engine, num_output_tokens)]
    assert not arriving.done(), "weights were swapped in while they were not there"
    await engine.wake()
    return await arriving


async def _cross(
    seen: Seen, engine: "GeneratorEngine", folders: list[Path], prompts: list[np.ndarray], *, sleeps: bool
) -> None:
    """Sequences run when version 1 and then version 2 arrive; late ones are asked for while 1 arrives."""
    installers = [installer(load_file(folder / "model.safetensors")) for folder in folders]
    running = asyncio.create_task(sample_all(engine, prompts, SAMPLING, num_samples=2))
    await let_decode(engine, 5)
    late: asyncio.Task[list[Rollout]] | None = None

    async def prefetch() -> None:
        nonlocal late
        late = asyncio.create_task(sample_all(engine, prompts[:4], SAMPLING, num_samples=1))
        await asyncio.sleep(0.02)

    def install(core: object) -> None:
        seen.num_running_at_install = len(core.scheduler.requests)
        installers[1](core)

    def arrive() -> Awaitable["SwapReport"]:
        return engine.update_weights(1, prefetch=prefetch, install=install)

    seen.crossing_reports = [await (_update_asleep(seen, engine, arrive) if sleeps else arrive())]
    await let_decode(engine, 3)
    second = await engine.update_weights(2, prefetch=nothing_to_fetch, install=installers[2])
    seen.crossing_reports.append(second)
    seen.crossing, seen.late = await running, await late


async def _fail(seen: Seen, engine: object, prompts: list[np.ndarray], *, stands_still: bool) -> None:
    """Sequences run while a fetch fails, then an install."""
    running = asyncio.create_task(sample_all(engine, prompts, SAMPLING, num_samples=2))
    await let_decode(engine, 3)
    seen.tokens_around_fetch = []

    async def fetch() -> None:
        seen.tokens_around_fetch.append(await ask(engine, num_output_tokens))
        # Nothing else shows that nothing is decoded.
        await (asyncio.sleep(0.1) if stands_still else let_decode(engine, 1))
        seen.tokens_around_fetch.append(await ask(engine, num_output_tokens))
        raise FetchFailed

    def install(core: object) -> None:
        raise FetchFailed

    for prefetch, act in ((fetch, installer({})), (nothing_to_fetch, install)):
        with pytest.raises(FetchFailed):
            await engine.update_weights(1, prefetch=prefetch, install=act)
    seen.survived = await running


async def _reveal(
    engine: "GeneratorEngine", folder: Path, prompts: list[np.ndarray], *, sleeps: bool
) -> list[Rollout]:
    """Many updates under load, some of them asked for at once."""
    versions = range(FIRST_REVEALED, FIRST_REVEALED + NUM_REVEALED)
    weights = {version: revealing_weights(folder, version) for version in versions}
    await update(engine, versions[0], weights[versions[0]])
    is_over = False
    rollouts: list[Rollout] = []

    async def load(prompt: np.ndarray) -> None:
        while not is_over:
            rollouts.extend(await sample_all(engine, [prompt], SAMPLING, num_samples=2))

    workers = [asyncio.create_task(load(prompt)) for prompt in prompts]
    for first in range(1, NUM_REVEALED, 2):
        await let_decode(engine, 2)
        pair = versions[first : first + 2]
        if sleeps:
            await engine.sleep()
            await engine.wake()
        await asyncio.gather(*(update(engine, one, weights[one]) for one in pair))
    await let_decode(engine, 2)
    is_over = True
    await asyncio.gather(*workers)
    return rollouts


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else []) for name in VARIANTS
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    """A mode."""
    return request.param


@pytest.fixture(scope="module")
def seen(name: str, folders: list[Path], facts: ModelFacts) -> Seen:
    """What it did."""
    return run_alone(_observe, folders, facts.vocab_size, name)


def test_every_token_is_as_the_weights_of_its_version_make_it(seen: Seen, models: Models, name: str) -> None:
    for rollout in seen.crossing + seen.late:
        reference = expected(models, rollout, recomputed=name not in KEEPS_OLD_CONTEXT)
        assert_logprobs(rollout, reference, SAMPLING)
        assert_routing(rollout, reference)


def test_sequences_cross_updates_where_the_mode_lets_them(seen: Seen, name: str) -> None:
    versions = [[span.version for span in rollout.version_spans] for rollout in seen.crossing]
    if name == "drain":
        assert seen.num_running_at_install == 0
        assert all(len(of_one) == 1 for of_one in versions)
        assert all(rollout.version_spans[0].version > 0 for rollout in seen.late), "late ones wait outside"
    else:
        assert seen.num_running_at_install > 0
        assert [0, 1, 2] in versions, "no sequence crossed both updates"
    if "sleep" in name:
        before, after = seen.tokens_asleep
        assert before == after > 0, "an engine that sleeps makes no step"


def test_the_report_says_what_became_of_running_sequences(seen: Seen, name: str) -> None:
    for report in seen.crossing_reports:
        assert (report.num_crossing > 0) == (not name.startswith(("drain", "abort_and_resume")))
        assert (report.num_resumed > 0) == name.startswith("abort_and_resume")
        # Sequences that cross while the engine sleeps have nothing left to compute again.
        assert (report.num_recomputed > 0) == name.endswith("recompute") or "sleep" in name
        assert report.pause_s > 0
    assert (seen.crossing_reports[0].waited_s > 0) == name.startswith(("drain", "blocking"))


def test_a_token_reveals_the_version_that_it_is_labelled_with(seen: Seen) -> None:
    assert seen.num_preemptions > 0, "memory was not scarce"
    versions: set[int] = set()
    for rollout in seen.revealed:
        labels = np.repeat(
            [span.version for span in rollout.version_spans],
            [span.end - span.start for span in rollout.version_spans],
        )
        assert rollout.response_ids_T.tolist() == labels.tolist()
        assert rollout.num_response_tokens == SAMPLING.max_response_tokens, "the budget of all parts together"
        assert rollout.finish_reason is FinishReason.LENGTH
        versions |= set(labels.tolist())
    assert len(versions) > NUM_REVEALED / 2


def test_responses_are_whole_with_their_records_and_texts(
    seen: Seen, facts: ModelFacts, tokenizer: PreTrainedTokenizerBase
) -> None:
    for rollout in (*seen.crossing, *seen.late, *seen.survived, *seen.revealed):
        check_rollout(rollout, RECORDS, facts)
        assert rollout.routed_experts.is_recorded_S[:-1].all()
        spans = rollout.version_spans
        assert spans[0].start == 0 and spans[-1].end == rollout.num_response_tokens
        assert all(a.end == b.start and a.version < b.version for a, b in itertools.pairwise(spans))
        assert rollout.text == tokenizer.decode(rollout.response_ids_T, skip_special_tokens=True)
        ended = rollout.response_ids_T[-1] == tokenizer.eos_token_id
        assert ended == (rollout.finish_reason is FinishReason.STOP)


def test_a_failing_update_leaves_the_old_weights(seen: Seen, models: Models, name: str) -> None:
    for rollout in seen.survived:
        assert [span.version for span in rollout.version_spans] == [0]
        assert_logprobs(rollout, expected(models, rollout, recomputed=True), SAMPLING)
    before, after = seen.tokens_around_fetch
    assert (before == after) == name.startswith("blocking"), "decoding stands still only if asked to"
    idle = seen.idle
    assert idle.num_crossing == idle.num_resumed == idle.num_recomputed == 0, "an idle engine takes the next"
