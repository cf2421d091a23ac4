"""A generator as an actor: its log in flight, read by its host, and groups that are continued from it.

One proc is all of them: what it has in flight is read while it runs, given up, and continued.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from monarch.actor import ActorError

from forgeasync.config import RunConfig, SamplingSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import (
    EpisodeId,
    InFlightRead,
    LoggedTurn,
    PayloadReader,
    SampledTurn,
    StoredRollout,
    TokenTrace,
    decode_rollout,
    group_turns,
    keep_group,
)
from forgeasync.runtime import (
    LOCAL_HOST_ID,
    CancelledGroup,
    EndedEpisode,
    GeneratorActor,
    LocalHost,
    ProcessManager,
    start_generators,
)
from forgeasync.testing import tiny_config, write_tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

PROMPT = np.arange(3, 15, dtype=np.int32)
SAMPLING = SamplingSection(max_response_tokens=140)
NUM_SAMPLES = 24
"""So many that some are under way whenever one looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    logged: list[LoggedTurn]
    """Of a group of responses that was given up within its sampling."""
    continued: list[TokenTrace]
    """The same group, continued."""
    turn: LoggedTurn
    """Of an episode that was dropped, most likely within its only turn."""
    repeated: SampledTurn
    """That turn, asked for again."""
    episode: TokenTrace
    restored_late: CancelledGroup | Mapping[EpisodeId, frozenset[int]]
    """The answer to restoring the group that was dropped here."""
    problem: str
    """With data that is torn."""
    missing: InFlightRead
    removed: bool


async def _scenario(config: RunConfig, folder: Path, out: Path) -> Seen:
    manager = ProcessManager(out)
    host = LocalHost(id=LOCAL_HOST_ID, folders=[])
    try:
        generators = await start_generators(manager, config, read_model_facts(str(folder)), folder)
        actor = generators.pool.replicas[0].actor
        log = await actor.in_flight.call_one()
        assert log is not None and log.is_relative_to(manager.payload_folders[0])

        # Nothing is asked of the log before the group has tokens in it.
        sampling = asyncio.ensure_future(_sample(actor, 40, None))
        read = await _until_logged(host, log, 40)
        await actor.cancel_groups.call_one([40])
        await sampling
        stored = await _sample(actor, 40, read.groups[40])
        assert not isinstance(stored, CancelledGroup)

        episode = EpisodeId(group_id=41, index=2)
        asking = asyncio.ensure_future(_turn(actor, episode, repeated=False))
        (turn,) = group_turns((await _until_logged(host, log, 41)).groups[41])
        await actor.drop_episodes.call_one(41)
        await asking
        late = await actor.restore_episodes.call_one(41, keep_group([turn]).data)
        elsewhere = replace(episode, group_id=42)
        turn = replace(turn, begun=replace(turn.begun, episode=elsewhere))
        restored = await actor.restore_episodes.call_one(42, keep_group([turn]).data)
        assert restored == ({} if turn.ended is None else {elsewhere: frozenset({0})})
        repeated = await _turn(actor, elsewhere, repeated=True)
        ended = EndedEpisode(episode=elsewhere, is_truncated=False)
        (of_episode,) = await actor.store_episodes.call_one(42, [ended])
        traces = [_trace(rollout) for rollout in (*stored, of_episode)]

        with pytest.raises(ActorError) as torn:
            await _sample(actor, 43, read.groups[40] + bytes(3))
        await host.remove_in_flight(log)
        return Seen(
            logged=list(group_turns(read.groups[40])),
            continued=traces[:-1],
            turn=turn,
            repeated=repeated,
            episode=traces[-1],
            restored_late=late,
            problem=str(torn.value.exception),
            missing=await host.read_in_flight(log, [40]),
            removed=not log.exists(),
        )
    finally:
        await manager.close()


async def _sample(
    actor: GeneratorActor, group_id: int, continued: bytes | None
) -> tuple[StoredRollout, ...] | CancelledGroup:
    return await actor.sample_group.call_one(
        group_id, PROMPT, num_samples=NUM_SAMPLES, sampling=SAMPLING, seed=1, continued=continued
    )


async def _turn(actor: GeneratorActor, episode: EpisodeId, *, repeated: bool) -> SampledTurn | CancelledGroup:
    return await actor.continue_episode.call_one(
        episode, None, PROMPT, SAMPLING, max_tokens=140, seed=7, repeated=repeated
    )


async def _until_logged(host: LocalHost, log: Path, group_id: int) -> InFlightRead:
    while not (read := await host.read_in_flight(log, [group_id])).num_kept:
        await asyncio.sleep(0)
    return read


def _trace(rollout: StoredRollout) -> TokenTrace:
    (branch,) = rollout.branches
    reader = PayloadReader(LOCAL_HOST_ID)
    return decode_rollout(reader.read(branch.prompt), reader.read(branch.response))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "hf", scale=6.0)
    out = tmp_path_factory.mktemp("logs")
    return asyncio.run(_scenario(tiny_config(folder), folder, out))


def test_a_group_goes_on_from_what_its_host_has_read(seen: Seen) -> None:
    assert len(seen.logged) == len(seen.continued) == NUM_SAMPLES
    assert sum(turn.num_tokens for turn in seen.logged) > 0
    for turn, trace in zip(seen.logged, seen.continued, strict=True):
        assert trace.prompt_ids_P.tolist() == PROMPT.tolist()
        assert_begins_with(trace, turn)


def assert_begins_with(trace: TokenTrace, turn: LoggedTurn) -> None:
    if turn.batch is None:
        return
    num_tokens = turn.num_tokens
    assert trace.response_ids_T[:num_tokens].tolist() == turn.batch.ids_N.tolist()
    assert trace.logprobs_T[:num_tokens].tobytes() == turn.batch.logprobs_N.tobytes()
    old_RMK = np.sort(turn.batch.rows_RMK, axis=-1)
    assert trace.routed_experts.expert_ids_RMK[: len(old_RMK)].tolist() == old_RMK.tolist()


def test_an_episode_goes_on_where_it_was_restored(seen: Seen) -> None:
    assert seen.repeated.turn == 0
    assert seen.episode.response_ids_T.tolist() == seen.repeated.ids_T.tolist()
    assert_begins_with(seen.episode, seen.turn)
    assert seen.restored_late == CancelledGroup(), "dropped groups do not come back"


def test_data_that_is_torn_is_refused(seen: Seen) -> None:
    assert "the last 3 of" in seen.problem and "are no whole record" in seen.problem


def test_the_log_of_a_process_can_be_removed(seen: Seen) -> None:
    assert seen.removed and seen.missing.groups == {}
    assert "cannot be read" in seen.missing.problem
