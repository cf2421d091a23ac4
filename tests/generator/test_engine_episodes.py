"""Episodes of several turns on a real engine: records, versions and prefixes, against transformers.

One process runs all scenarios; the tests look at what came out.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from forgeasync.config import GeneratorSection, Interruption, ModelFacts, SamplingSection, WeightsSection
from forgeasync.rollouts import EpisodeId, FinishReason, Rollout, SampledTurn, check_rollout
from tests.generator.conftest import Models, Seen
from tests.support.engines import (
    RECORDS,
    kept_by_definition,
    let_decode,
    revealing_weights,
    start_engine,
    update,
)
from tests.support.processes import run_alone

if TYPE_CHECKING:
    from forgeasync.generator import GeneratorEngine

SAMPLING = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=26)
GENERATOR = GeneratorSection(max_num_seqs=16, max_num_batched_tokens=48, kv_cache_gib=0.01)
# A cache block holds 128 tokens: the second turn of these begins behind a full one.
PROMPTS = [np.arange(3, 3 + length).astype(np.int32) % 17 + 3 for length in (5, 40, 120)]
GIVEN = np.array([7, 8, 9, 10], np.int32)
TURN_TOKENS = 12


class Scenarios:
    """What episodes of an engine do; their ids are those of ``PROMPTS``."""

    def __init__(self, engine: "GeneratorEngine") -> None:
        from forgeasync.generator import EngineEpisodes

        self.engine = engine
        self.episodes = EngineEpisodes(engine)

    def turns(
        self, group_id: int, given: list[np.ndarray], *, after: int | None = None, attempt: int = 0
    ) -> "asyncio.Future[list[SampledTurn]]":
        """A turn of each episode of a group; ``attempt`` is that of the first one."""
        return asyncio.gather(
            *(
                self.episodes.add_turn(
                    EpisodeId(group_id=group_id, index=index, attempt=0 if index else attempt),
                    after,
                    ids,
                    sampling=SAMPLING,
                    max_tokens=TURN_TOKENS,
                    seed=None,
                )
                for index, ids in enumerate(given)
            )
        )

    async def take(self, group_id: int) -> list[Rollout]:
        """The only branch of each episode of a group."""
        ids = [EpisodeId(group_id=group_id, index=index) for index in range(len(PROMPTS))]
        return [branch for (branch,) in await self.episodes.take(group_id, ids)]

    async def num_running(self) -> int:
        return await self.engine.between_steps(lambda core: len(core.scheduler.requests))

    async def branches(self) -> list[Rollout]:
        """A first turn, two turns together after it, one after the second of them, and another root."""
        await self.turns(20, PROMPTS[1:2])
        await asyncio.gather(self.turns(20, [GIVEN], after=0), self.turns(20, [GIVEN[:2]], after=0))
        await self.turns(20, [GIVEN], after=2)
        await self.turns(20, PROMPTS[:1])
        (tree,) = await self.episodes.take(20, [EpisodeId(group_id=20, index=0)])
        return list(tree)

    async def drop_attempt(self) -> tuple[str, int, list[int]]:
        """The first attempt is dropped within a turn; the second one is taken, with a sibling.

        Returns what the turn raises, the requests left of it, and the number of branches of all attempts.
        """
        first, second = (EpisodeId(group_id=30, index=0, attempt=attempt) for attempt in (0, 1))
        lost = asyncio.ensure_future(self.turns(30, PROMPTS[:1]))
        await let_decode(self.engine, 2)
        await self.episodes.drop_episode(first)
        (error,) = await asyncio.gather(lost, return_exceptions=True)
        num_left = await self.num_running()
        await self.turns(30, PROMPTS[:1] * 2, attempt=1)
        trees = await self.episodes.take(30, [first, second, EpisodeId(group_id=30, index=1)])
        return type(error).__name__, num_left, [len(tree) for tree in trees]

    async def take_early(self, folder: Path) -> tuple[list[int], list[str], int]:
        """A group is taken while the second turn is under way, of which weights have ended a first part.

        Under weights that make one token certain, no turn ends before its limit. Returns the tokens of the
        branches, what that turn and one after it raise, and the requests left.
        """
        await update(self.engine, 3, revealing_weights(folder, 3))
        await self.turns(40, PROMPTS[:1])
        late = asyncio.ensure_future(self.turns(40, [GIVEN], after=0))
        await let_decode(self.engine, 2)
        await update(self.engine, 4, revealing_weights(folder, 4))
        await let_decode(self.engine, 1)
        (tree,) = await self.episodes.take(40, [EpisodeId(group_id=40, index=0)])
        after = asyncio.ensure_future(self.turns(40, [GIVEN], after=0))
        errors = await asyncio.gather(late, after, return_exceptions=True)
        num_left = await self.num_running()
        return [one.num_response_tokens for one in tree], [type(one).__name__ for one in errors], num_left


async def _observe(folders: list[Path]) -> Seen:
    seen = Seen()
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    given = [GIVEN] * len(PROMPTS)

    engine = await start_engine(folders[0], GENERATOR)
    one = Scenarios(engine)
    seen.dropped = await one.drop_attempt()
    # Two turns under one version.
    await one.turns(0, PROMPTS)
    seen.last_turns = await one.turns(0, given, after=0)
    seen.plain = await one.take(0)
    seen.branched = await one.branches()
    # Other weights come between the turns, and again within the second ones.
    await one.turns(2, PROMPTS)
    seen.reports = [await update(engine, 1, weights[1])]
    running = asyncio.ensure_future(one.turns(2, given, after=0))
    await let_decode(engine, 2)
    seen.reports.append(await update(engine, 2, weights[1]))
    await running
    seen.between = await one.take(2)
    # Turns of cancelled and dropped groups.
    await one.turns(3, PROMPTS)
    await engine.cancel([3])
    running = asyncio.ensure_future(one.turns(4, PROMPTS))
    await let_decode(engine, 2)
    await one.episodes.drop(4)
    attempts = (one.turns(3, given[:1], after=0), running, one.turns(4, PROMPTS[:1]))
    errors = await asyncio.gather(*attempts, return_exceptions=True)
    await one.episodes.drop(3)
    seen.cancelled = [type(error).__name__ for error in errors]
    seen.num_left = await one.num_running() + len(engine._groups._groups)
    engine.shutdown()

    # Other weights come within the first turn, which ends and is resumed, and again within the second.
    resuming = WeightsSection(interruption=Interruption.ABORT_AND_RESUME)
    engine = await start_engine(folders[0], GENERATOR, resuming)
    one = Scenarios(engine)
    for version, ids in ((1, PROMPTS), (2, given)):
        running = asyncio.ensure_future(one.turns(0, ids, after=None if version == 1 else 0))
        await let_decode(engine, 3)
        await update(engine, version, weights[version])
        await running
    seen.resumed = await one.take(0)
    seen.early = await one.take_early(folders[0])
    engine.shutdown()
    return seen


@pytest.fixture(scope="module")
def observed(folders: list[Path]) -> Seen:
    return run_alone(_observe, folders)


def sampled_positions(rollout: Rollout) -> dict[int, int]:
    """Version by position in the whole trajectory."""
    start = len(rollout.prompt_ids_P)
    return {
        start + index: span.version for span in rollout.version_spans for index in range(span.start, span.end)
    }


@torch.no_grad()
def assert_recomputed(rollout: Rollout, models: Models) -> None:
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
    observed: Seen, models: Models, facts: ModelFacts, tokenizer: PreTrainedTokenizerBase
) -> None:
    for rollout, prompt, last in zip(observed.plain, PROMPTS, observed.last_turns, strict=True):
        assert rollout.prompt_ids_P.tolist() == prompt.tolist()
        given = np.flatnonzero(~rollout.is_sampled_T)
        assert rollout.response_ids_T[given].tolist() == GIVEN.tolist()
        assert len(rollout.response_ids_T) == given[-1] + 1 + last.num_tokens
        ids = rollout.response_ids_T[given[-1] + 1 :]
        assert last.text == tokenizer.decode(ids, skip_special_tokens=True) and last.last_id == ids[-1]
        assert (last.finish_reason is FinishReason.STOP) == (last.last_id == tokenizer.eos_token_id)
        assert rollout.text == tokenizer.decode(rollout.response_ids_T, skip_special_tokens=True)
        assert rollout.finish_reason is last.finish_reason
        unrecorded = np.flatnonzero(~rollout.routed_experts.is_recorded_S)
        assert unrecorded.tolist() == [len(prompt) + len(rollout.response_ids_T) - 1], "the last token"
        check_rollout(rollout, RECORDS, facts)
        assert_recomputed(rollout, models)


def test_branches_share_the_turns_before_them(observed: Seen, models: Models, facts: ModelFacts) -> None:
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


def test_weights_that_come_between_turns_change_the_next_turn_only(observed: Seen, models: Models) -> None:
    same = {0: models[0], 1: models[1], 2: models[1]}
    for rollout in observed.between:
        versions = sampled_positions(rollout)
        given = len(rollout.prompt_ids_P) + np.flatnonzero(~rollout.is_sampled_T)
        assert {version for at, version in versions.items() if at < given[0]} == {0}
        assert {version for at, version in versions.items() if at > given[-1]} <= {1, 2}
        assert_recomputed(rollout, same)
    assert any(rollout.version_spans[-1].version == 2 for rollout in observed.between)


def test_turns_that_are_interrupted_keep_what_was_first_computed(observed: Seen, models: Models) -> None:
    for rollout in observed.resumed:
        assert_recomputed(rollout, models)
    versions = [[span.version for span in rollout.version_spans] for rollout in observed.resumed]
    assert any({0, 1, 2} == set(of_one) for of_one in versions), versions


def test_updates_tell_how_far_groups_of_episodes_are(observed: Seen) -> None:
    """Between turns nothing runs; within the second one, tokens of the first count."""
    between, within = observed.reports
    assert between.progress == ()
    (progress,) = within.progress
    assert progress.group_id == 2 and progress.num_running >= 1
    first_turns = sum(int(np.flatnonzero(~rollout.is_sampled_T)[0]) for rollout in observed.between)
    assert progress.num_tokens > first_turns


def test_what_is_given_up_ends_and_leaves_nothing(observed: Seen) -> None:
    assert observed.dropped == ("GroupCancelled", 0, [0, 1, 1]), "its group goes on"
    assert observed.early == ([TURN_TOKENS], ["GroupCancelled"] * 2, 0), "taken within a turn"
    assert observed.cancelled == ["GroupCancelled"] * 3
    assert observed.num_left == 0, "no group, no request"
