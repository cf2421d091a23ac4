"""A generator as an actor: its log in flight, read by its host, and groups that are continued from it.

One proc is all of them: what it has in flight is read while it runs, given up, and continued.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from monarch.actor import ActorError

from forgeasync.config import SamplingSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import (
    EpisodeId,
    InFlightRead,
    LoggedTurn,
    PayloadReader,
    SampledTurn,
    StoredRollout,
    decode_rollout,
    group_turns,
    keep_group,
)
from forgeasync.runtime import (
    LOCAL_HOST_ID,
    EndedEpisode,
    GeneratorActor,
    LocalHost,
    ProcessManager,
    RefusedGroup,
    start_generators,
)
from forgeasync.testing import tiny_config, write_tiny_model

PROMPT = np.arange(3, 15, dtype=np.int32)
SAMPLING = SamplingSection(max_response_tokens=140)
NUM_SAMPLES = 24
"""A number with which some are in flight whenever one looks."""


async def _sample(
    actor: GeneratorActor, group_id: int, continued: bytes | None
) -> tuple[StoredRollout, ...] | RefusedGroup:
    return await actor.sample_group.call_one(
        group_id, PROMPT, num_samples=NUM_SAMPLES, sampling=SAMPLING, seed=1, continued=continued
    )


async def _turn(actor: GeneratorActor, episode: EpisodeId, *, repeated: bool) -> SampledTurn | None:
    return await actor.continue_episode.call_one(
        episode, None, PROMPT, SAMPLING, max_tokens=140, seed=7, repeated=repeated
    )


async def _until_logged(host: LocalHost, log: Path, group_id: int) -> InFlightRead:
    while not (read := await host.read_in_flight(log, [group_id])).num_kept:
        await asyncio.sleep(0)
    return read


def _ids_after(rollout: StoredRollout, turn: LoggedTurn) -> list[int]:
    """The tokens of a response, which begins with all that was logged of it."""
    (branch,) = rollout.branches
    reader = PayloadReader(LOCAL_HOST_ID)
    trace = decode_rollout(reader.read(branch.prompt), reader.read(branch.response))
    assert trace.prompt_ids_P.tolist() == PROMPT.tolist()
    if turn.batch is not None:
        num_tokens = turn.num_tokens
        assert trace.response_ids_T[:num_tokens].tolist() == turn.batch.ids_N.tolist()
        assert trace.logprobs_T[:num_tokens].tobytes() == turn.batch.logprobs_N.tobytes()
        old_RMK = np.sort(turn.batch.rows_RMK, axis=-1)
        assert trace.routed_experts.expert_ids_RMK[: len(old_RMK)].tolist() == old_RMK.tolist()
    return trace.response_ids_T.tolist()


async def _continue_groups(actor: GeneratorActor, host: LocalHost, log: Path) -> None:
    # Nothing is asked of the log before the group has tokens in it.
    sampling = asyncio.ensure_future(_sample(actor, 40, None))
    data = (await _until_logged(host, log, 40)).groups[40]
    await actor.cancel_groups.call_one([40])
    await sampling
    logged, stored = list(group_turns(data)), await _sample(actor, 40, data)
    assert not isinstance(stored, RefusedGroup) and sum(turn.num_tokens for turn in logged) > 0
    assert len(stored) == len(logged) == NUM_SAMPLES
    for turn, rollout in zip(logged, stored, strict=True):
        _ids_after(rollout, turn)
    with pytest.raises(ActorError) as torn:
        await _sample(actor, 43, data + bytes(3))
    assert "the last 3 of" in str(torn.value.exception)


async def _continue_episodes(actor: GeneratorActor, host: LocalHost, log: Path) -> None:
    """One is dropped, most likely within its only turn, and goes on as one of another group."""
    episode = EpisodeId(group_id=41, index=2)
    asking = asyncio.ensure_future(_turn(actor, episode, repeated=False))
    (turn,) = group_turns((await _until_logged(host, log, 41)).groups[41])
    await actor.drop_episodes.call_one(41)
    await asking
    late = await actor.restore_episodes.call_one(41, keep_group([turn]).data)
    assert late is None, "dropped groups do not come back"
    episode = replace(episode, group_id=42)
    turn = replace(turn, begun=replace(turn.begun, episode=episode))
    restored = await actor.restore_episodes.call_one(42, keep_group([turn]).data)
    assert restored == ({} if turn.ended is None else {episode: frozenset({0})})
    repeated = await _turn(actor, episode, repeated=True)
    assert isinstance(repeated, SampledTurn) and repeated.turn == 0
    ended = EndedEpisode(episode=episode, is_truncated=False)
    (stored,) = await actor.store_episodes.call_one(42, [ended])
    assert _ids_after(stored, turn) == repeated.ids_T.tolist()


@pytest.mark.processes
@pytest.mark.exhaustive
async def test_groups_and_episodes_go_on_from_what_their_host_has_read(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", scale=6.0)
    manager = ProcessManager(tmp_path)
    host = LocalHost(id=LOCAL_HOST_ID, folders=[])
    try:
        generators = await start_generators(
            manager, tiny_config(folder), read_model_facts(str(folder)), folder
        )
        (replica,) = generators.pool.replicas
        actor, log = replica.actor, replica.spawned.in_flight
        assert log is not None and log.is_relative_to(manager.payload_folders[0])
        await _continue_groups(actor, host, log)
        await _continue_episodes(actor, host, log)
        await host.remove_in_flight(log)
        missing = await host.read_in_flight(log, [40])
        assert not log.exists() and missing.groups == {} and "cannot be read" in missing.problem
    finally:
        await manager.close()
