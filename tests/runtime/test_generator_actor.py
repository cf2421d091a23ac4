"""A generator as an actor: how its process starts, its log in flight, and groups that go on from it."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from monarch.actor import ActorError, this_host

from forgeasync.config import SamplingSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import (
    CaptureSpec,
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
    GeneratorSetup,
    LocalHost,
    ProcessManager,
    spawn_role,
    start_generators,
)
from forgeasync.testing import tiny_config, write_tiny_model

DEADLINE_S = 120.0
PROMPT = np.arange(3, 15, dtype=np.int32)
SAMPLING = SamplingSection(max_response_tokens=140)
NUM_SAMPLES = 24
"""So many that some are under way whenever one looks."""


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


@pytest.mark.procs
@pytest.mark.exhaustive
async def test_a_group_and_an_episode_go_on_from_what_their_host_has_read(tmp_path: Path) -> None:
    """One proc is all of them: what it has in flight is read while it runs, given up, and continued."""
    folder = write_tiny_model(tmp_path / "hf", scale=6.0)
    manager = ProcessManager(tmp_path / "logs")
    host = LocalHost(id=LOCAL_HOST_ID, folders=[])
    try:
        facts = read_model_facts(str(folder))
        generators = await start_generators(manager, tiny_config(folder), facts, folder)
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
        logged = list(group_turns(read.groups[40]))
        assert len(logged) == len(stored) == NUM_SAMPLES
        assert sum(turn.num_tokens for turn in logged) > 0
        for turn, rollout in zip(logged, stored, strict=True):
            trace = _trace(rollout)
            assert trace.prompt_ids_P.tolist() == PROMPT.tolist()
            assert_begins_with(trace, turn)

        # Dropped, most likely within its only turn, and asked for again as one of another group.
        episode = EpisodeId(group_id=41, index=2)
        asking = asyncio.ensure_future(_turn(actor, episode, repeated=False))
        (turn,) = group_turns((await _until_logged(host, log, 41)).groups[41])
        await actor.drop_episodes.call_one(41)
        await asking
        late = await actor.restore_episodes.call_one(41, keep_group([turn]).data)
        assert late == CancelledGroup(), "dropped groups do not come back"
        elsewhere = replace(episode, group_id=42)
        turn = replace(turn, begun=replace(turn.begun, episode=elsewhere))
        restored = await actor.restore_episodes.call_one(42, keep_group([turn]).data)
        assert restored == ({} if turn.ended is None else {elsewhere: frozenset({0})})
        repeated = await _turn(actor, elsewhere, repeated=True)
        ended = EndedEpisode(episode=elsewhere, is_truncated=False)
        (of_episode,) = await actor.store_episodes.call_one(42, [ended])
        assert isinstance(repeated, SampledTurn) and repeated.turn == 0
        trace = _trace(of_episode)
        assert trace.response_ids_T.tolist() == repeated.ids_T.tolist()
        assert_begins_with(trace, turn)

        with pytest.raises(ActorError, match=r"the last 3 of .* are no whole record"):
            await _sample(actor, 43, read.groups[40] + bytes(3))
        await host.remove_in_flight(log)
        missing = await host.read_in_flight(log, [40])
        assert not log.exists() and missing.groups == {} and "cannot be read" in missing.problem
    finally:
        await manager.close()


def assert_begins_with(trace: TokenTrace, turn: LoggedTurn) -> None:
    if turn.batch is None:
        return
    num_tokens = turn.num_tokens
    assert trace.response_ids_T[:num_tokens].tolist() == turn.batch.ids_N.tolist()
    assert trace.logprobs_T[:num_tokens].tobytes() == turn.batch.logprobs_N.tobytes()
    old_RMK = np.sort(turn.batch.rows_RMK, axis=-1)
    assert trace.routed_experts.expert_ids_RMK[: len(old_RMK)].tolist() == old_RMK.tolist()


class BuildsOnDemand(GeneratorActor):
    """Its engine's core is built while somebody holds a pipe open, and fails then."""

    def __init__(self, log_dir: Path, rank: int, pipe: Path) -> None:
        super().__init__(log_dir, rank)
        from forgeasync.generator.workarounds import inprocess_client

        def build(*_: object) -> None:
            with pipe.open("rb") as file:
                raise ValueError(f"told {file.read().decode()}")

        inprocess_client.EngineCore = build


@pytest.mark.procs
@pytest.mark.exhaustive
async def test_a_process_answers_while_its_engine_is_built(tmp_path: Path) -> None:
    folder, pipe = write_tiny_model(tmp_path / "hf"), tmp_path / "pipe"
    os.mkfifo(pipe)
    config = tiny_config(folder)
    setup = GeneratorSetup(
        model_path=folder,
        facts=read_model_facts(str(folder)),
        section=config.generator,
        max_context_length=config.model.max_context_length,
        seed=0,
        records=CaptureSpec(routing=True, kept_tokens=False),
        weights=config.weights,
        lora=None,
        payload_capacity_bytes=2**20,
        gpu_bytes=0,
    )
    mesh = spawn_role(this_host(), "generator", num_procs=1)
    actor = mesh.spawn("generator", BuildsOnDemand, tmp_path, 0, pipe)
    building = asyncio.ensure_future(actor.setup.call_one(setup, "host-0", tmp_path))
    try:
        # Opened once the other end is, in the midst of building.
        with await asyncio.to_thread(pipe.open, "wb", buffering=0) as held:
            async with asyncio.timeout(DEADLINE_S):
                assert await actor.pid.call_one() != os.getpid()
            held.write(b"to fail")
        with pytest.raises(ActorError, match="ValueError: told to fail"):
            await building
    finally:
        await mesh.stop()


def test_the_process_of_an_engine_imports_no_web_server() -> None:
    """vLLM asks every global of every module for its attributes, and some of werkzeug's refuse to answer."""
    code = (
        "import sys, forgeasync.runtime.teacher as t; print(sorted({'flask', 'werkzeug'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
