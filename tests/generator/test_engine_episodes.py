"""Episodes of several turns on a real engine: records, versions and prefixes, against transformers.

One process runs all scenarios; the tests look at what came out.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from forgeasync.config import GeneratorSection, Interruption, SamplingSection, WeightsSection
from forgeasync.generator import SwapReport
from forgeasync.models import read_model_facts
from forgeasync.rollouts import EpisodeId, FinishReason, Rollout, SampledTurn, check_rollout
from tests.support.engines import (
    RECORDS,
    kept_by_definition,
    let_decode,
    revealing_weights,
    start_engine,
    update,
)
from tests.support.processes import run_alone

SAMPLING = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=26)
GENERATOR = GeneratorSection(max_num_seqs=16, max_num_batched_tokens=48, kv_cache_gib=0.01)
# A cache block holds 128 tokens: the second turn of these begins behind a full one.
PROMPTS = [np.arange(3, 3 + length).astype(np.int32) % 17 + 3 for length in (5, 40, 120)]
GIVEN = np.array([7, 8, 9, 10], np.int32)
TURN_TOKENS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    plain: list[Rollout]
    """Two turns under one version."""
    turns: list[SampledTurn]
    """Of these, the last ones."""
    branched: list[Rollout]
    """A first turn, two turns together after it, one after the second of them, and another root."""
    dropped: tuple[str, int, list[int]]
    """What a turn of a dropped attempt raises, the requests left of it, and the branches of all attempts."""
    early: tuple[list[int], list[str], int]
    """Tokens of the branches of a group that was taken within a turn, what that turn and one after it raise,
    and the requests left."""
    between: list[Rollout]
    """Other weights came between the turns."""
    resumed: list[Rollout]
    """Other weights came within the first turn, which ended and was resumed, and again within the second."""
    progress: list[SwapReport]
    """Of the update between the turns of ``between`` and of one within their second turns."""
    cancelled: list[str]
    """What turns of cancelled and dropped groups raise."""
    num_groups_left: int
    num_requests_left: int


async def _observe(folders: list[Path]) -> Observed:
    from forgeasync.generator import EngineEpisodes

    weights = [load_file(folder / "model.safetensors") for folder in folders]

    def turns(
        episodes: EngineEpisodes,
        group_id: int,
        given: list[np.ndarray],
        *,
        after: int | None = None,
        attempts: tuple[int, ...] = (0, 0, 0),
    ) -> "asyncio.Future[list[SampledTurn]]":
        return asyncio.gather(
            *(
                episodes.add_turn(
                    EpisodeId(group_id=group_id, index=index, attempt=attempts[index]),
                    after,
                    ids,
                    sampling=SAMPLING,
                    max_tokens=TURN_TOKENS,
                    seed=None,
                )
                for index, ids in enumerate(given)
            )
        )

    async def take(episodes: EngineEpisodes, group_id: int, num: int) -> list[Rollout]:
        ids = [EpisodeId(group_id=group_id, index=index) for index in range(num)]
        trees = await episodes.take(group_id, ids)
        return [branch for (branch,) in trees]

    async def branches(episodes: EngineEpisodes) -> list[Rollout]:
        await turns(episodes, 20, PROMPTS[1:2])
        await asyncio.gather(turns(episodes, 20, [GIVEN], after=0), turns(episodes, 20, [GIVEN[:2]], after=0))
        await turns(episodes, 20, [GIVEN], after=2)
        await turns(episodes, 20, PROMPTS[:1])
        (tree,) = await episodes.take(20, [EpisodeId(group_id=20, index=0)])
        return list(tree)

    async def drop_attempt(episodes: EngineEpisodes) -> tuple[str, int, list[int]]:
        """The first attempt is dropped within a turn; the second one is taken, with a sibling."""
        first, second = (EpisodeId(group_id=30, index=0, attempt=attempt) for attempt in (0, 1))
        sibling = EpisodeId(group_id=30, index=1)

        lost = asyncio.ensure_future(turns(episodes, 30, PROMPTS[:1]))
        await let_decode(engine, 2)
        await episodes.drop_episode(first)
        (error,) = await asyncio.gather(lost, return_exceptions=True)
        num_left = await num_running()
        await turns(episodes, 30, PROMPTS[:1] * 2, attempts=(1, 0))
        trees = await episodes.take(30, [first, second, sibling])
        return type(error).__name__, num_left, [len(tree) for tree in trees]

    async def take_early(episodes: EngineEpisodes) -> tuple[list[int], list[str], int]:
        """A group is taken while the second turn is under way, of which weights have ended a first part.

        Under weights that make one token certain, no turn ends before its limit.
        """
        await update(engine, 3, revealing_weights(folders[0], 3))
        await turns(episodes, 40, PROMPTS[:1])
        late = asyncio.ensure_future(turns(episodes, 40, [GIVEN], after=0))
        await let_decode(engine, 2)
        await update(engine, 4, revealing_weights(folders[0], 4))
        await let_decode(engine, 1)
        (tree,) = await episodes.take(40, [EpisodeId(group_id=40, index=0)])
        after = asyncio.ensure_future(turns(episodes, 40, [GIVEN], after=0))
        errors = await asyncio.gather(late, after, return_exceptions=True)
        num_left = await num_running()
        return [one.num_response_tokens for one in tree], [type(one).__name__ for one in errors], num_left

    async def num_running() -> int:
        return await engine.between_steps(lambda core: len(core.scheduler.requests))

    engine = await start_engine(folders[0], GENERATOR)
    episodes = EngineEpisodes(engine)
    dropped = await drop_attempt(episodes)
    given = [GIVEN] * len(PROMPTS)
    await turns(episodes, 0, PROMPTS)
    last_turns = await turns(episodes, 0, given, after=0)
    plain = await take(episodes, 0, len(PROMPTS))
    branched = await branches(episodes)

    await turns(episodes, 2, PROMPTS)
    progress = [await update(engine, 1, weights[1])]
    running = asyncio.ensure_future(turns(episodes, 2, given, after=0))
    await let_decode(engine, 2)
    progress.append(await update(engine, 2, weights[1]))
    await running
    between = await take(episodes, 2, len(PROMPTS))

    await turns(episodes, 3, PROMPTS)
    await engine.cancel([3])
    running = asyncio.ensure_future(turns(episodes, 4, PROMPTS))
    await let_decode(engine, 2)
    await episodes.drop(4)
    attempts = (turns(episodes, 3, given[:1], after=0), running, turns(episodes, 4, PROMPTS[:1]))
    cancelled = await asyncio.gather(*attempts, return_exceptions=True)
    await episodes.drop(3)
    num_requests = await num_running()
    num_groups = len(engine._groups._groups)

    engine.shutdown()

    engine = await start_engine(
        folders[0], GENERATOR, WeightsSection(interruption=Interruption.ABORT_AND_RESUME)
    )
    episodes = EngineEpisodes(engine)
    for version, ids in ((1, PROMPTS), (2, given)):
        after = None if version == 1 else 0
        running = asyncio.ensure_future(turns(episodes, 0, list(ids), after=after))
        await let_decode(engine, 3)
        await update(engine, version, weights[version])
        await running
    resumed = await take(episodes, 0, len(PROMPTS))
    early = await take_early(episodes)
    engine.shutdown()
    return Observed(
        plain=plain,
        branched=branched,
        dropped=dropped,
        early=early,
        turns=last_turns,
        between=between,
        resumed=resumed,
        progress=progress,
        cancelled=[type(one).__name__ for one in cancelled],
        num_groups_left=num_groups,
        num_requests_left=num_requests,
    )


@pytest.fixture(scope="module")
def observed(folders: list[Path]) -> Observed:
    return run_alone(_observe, folders)


def sampled_positions(rollout: Rollout) -> dict[int, int]:
    """Version by position in the whole trajectory."""
    start = len(rollout.prompt_ids_P)
    return {
        start + index: span.version for span in rollout.version_spans for index in range(span.start, span.end)
    }


@torch.no_grad()
def assert_recomputed(rollout: Rollout, models: Mapping[int, torch.nn.Module]) -> None:
    """Log-probabilities, kept sets and routing of every token as the weights of its version make them.

    Where every request computes its prompt anew, a token attends to what its own weights made of the others.
    """
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids_P, rollout.response_ids_T])).long()
    outputs = {
        version: models[version](ids[None], output_router_logits=True)
        for version in {span.version for span in rollout.version_spans}
    }
    versions = sampled_positions(rollout)
    routing_SMK = rollout.routed_experts.to_dense()
    start = len(rollout.prompt_ids_P)
    for position in range(len(ids) - 1):
        # An input is first computed for the next token that is sampled after it.
        version = versions[min(at for at in versions if at > position)]
        layers = outputs[version].router_logits
        for layer, logits_SE in enumerate(layers):
            row_E = logits_SE[position]
            chosen = row_E[torch.from_numpy(routing_SMK[position, layer].astype(np.int64))]
            assert chosen.min() > row_E.topk(3).values.min() - 1e-3, (position, layer)
        if position + 1 not in versions:
            continue
        row_V = outputs[version].logits[0, position].double() / SAMPLING.temperature
        surely, maybe = kept_by_definition(row_V, SAMPLING)
        kept = rollout.kept_tokens.row(position + 1 - start).tolist() or list(range(len(row_V)))
        assert surely <= set(kept) <= maybe
        wanted = float(torch.log_softmax(row_V[kept], 0)[kept.index(int(ids[position + 1]))])
        assert abs(float(rollout.logprobs_T[position + 1 - start]) - wanted) < 2e-4


def test_two_turns_are_one_trajectory(
    observed: Observed, models: Mapping[int, torch.nn.Module], folders: list[Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    facts = read_model_facts(str(folders[0]))
    for rollout, prompt, last in zip(observed.plain, PROMPTS, observed.turns, strict=True):
        assert rollout.prompt_ids_P.tolist() == prompt.tolist()
        given = np.flatnonzero(~rollout.is_sampled_T)
        assert rollout.response_ids_T[given].tolist() == GIVEN.tolist()
        assert len(rollout.response_ids_T) == given[-1] + 1 + last.num_tokens
        ids = rollout.response_ids_T[given[-1] + 1 :]
        assert last.text == tokenizer.decode(ids, skip_special_tokens=True) and last.last_id == ids[-1]
        assert (last.finish_reason is FinishReason.STOP) == (last.last_id == tokenizer.eos_token_id)
        assert rollout.text == tokenizer.decode(rollout.response_ids_T, skip_special_tokens=True)
        assert rollout.finish_reason is last.finish_reason
        assert rollout.routed_experts.is_recorded_S.tolist() == [True] * (
            len(prompt) + len(rollout.response_ids_T) - 1
        ) + [False]
        check_rollout(rollout, RECORDS, facts)
        assert_recomputed(rollout, models)


def test_branches_share_the_turns_before_them(
    observed: Observed, models: Mapping[int, torch.nn.Module], folders: list[Path]
) -> None:
    facts = read_model_facts(str(folders[0]))
    first, second, root = observed.branched
    num_first = len(PROMPTS[1]) + int(np.flatnonzero(~first.is_sampled_T)[0])
    assert first.prompt_ids_P.tolist() == PROMPTS[1].tolist()
    # The first turn trains with the first branch; in the second one it is part of the prompt.
    path = np.concatenate([first.prompt_ids_P, first.response_ids_T])[:num_first]
    assert second.prompt_ids_P.tolist() == [*path.tolist(), *GIVEN[:2].tolist()]
    routing_SMK = [one.routed_experts.to_dense()[:num_first] for one in (first, second)]
    assert (routing_SMK[0] == routing_SMK[1]).all() and (routing_SMK[0] >= 0).all()
    assert (~second.is_sampled_T).sum() == len(GIVEN), "given before its second turn"
    assert root.prompt_ids_P.tolist() == PROMPTS[0].tolist() and root.is_sampled_T is None
    for rollout in observed.branched:
        check_rollout(rollout, RECORDS, facts)
        assert_recomputed(rollout, models)


def test_weights_that_come_between_turns_change_the_next_turn_only(
    observed: Observed, models: Mapping[int, torch.nn.Module]
) -> None:
    same = {0: models[0], 1: models[1], 2: models[1]}
    for rollout in observed.between:
        versions = sampled_positions(rollout)
        given = len(rollout.prompt_ids_P) + np.flatnonzero(~rollout.is_sampled_T)
        assert {version for at, version in versions.items() if at < given[0]} == {0}
        assert {version for at, version in versions.items() if at > given[-1]} <= {1, 2}
        assert_recomputed(rollout, same)
    assert any(rollout.version_spans[-1].version == 2 for rollout in observed.between)


def test_turns_that_are_interrupted_keep_what_was_first_computed(
    observed: Observed, models: Mapping[int, torch.nn.Module]
) -> None:
    for rollout in observed.resumed:
        assert_recomputed(rollout, models)
    versions = [[span.version for span in rollout.version_spans] for rollout in observed.resumed]
    assert any({0, 1, 2} == set(of_one) for of_one in versions), versions


def test_updates_tell_how_far_groups_of_episodes_are(observed: Observed) -> None:
    """Between turns nothing runs; within the second one, tokens of the first count."""
    between, within = observed.progress
    assert between.progress == ()
    (progress,) = within.progress
    assert progress.group_id == 2 and progress.num_running >= 1
    first_turns = sum(int(np.flatnonzero(~rollout.is_sampled_T)[0]) for rollout in observed.between)
    assert progress.num_tokens > first_turns


def test_what_is_given_up_ends_and_leaves_nothing(observed: Observed) -> None:
    assert observed.dropped == ("GroupCancelled", 0, [0, 1, 1]), "its group goes on"
    assert observed.early == ([TURN_TOKENS], ["GroupCancelled"] * 2, 0), "taken within a turn"
    assert observed.cancelled == ["GroupCancelled"] * 3
    assert observed.num_groups_left == observed.num_requests_left == 0
