"""Groups whose generator is killed in mid-step, continued by another engine from what the first one logged.

Processes of their own run two engines, one of which dies; the tests look at what came out.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.torch import load_file

from forgeasync.config import GeneratorSection, Interruption, ModelFacts, SamplingSection, WeightsSection
from forgeasync.rollouts import (
    EpisodeId,
    FinishReason,
    InFlightRead,
    LoggedTurn,
    Rollout,
    SampledTurn,
    check_rollout,
    group_turns,
    read_in_flight,
)
from tests.generator.conftest import Models, Seen
from tests.generator.test_engine_episodes import assert_recomputed
from tests.support.engines import RECORDS, assert_begins_with, let_decode, start_engine, update
from tests.support.processes import ProcessFailed, run_alone

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

    from forgeasync.generator import EngineEpisodes, GeneratorEngine

SAMPLING = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=26)
# Room for 12 cache blocks of 128 tokens: sequences wait for each other and are preempted.
GENERATOR = GeneratorSection(max_num_seqs=16, max_num_batched_tokens=48, kv_cache_gib=0.0015)
RESUMING = WeightsSection(interruption=Interruption.ABORT_AND_RESUME)
# The last two groups share a block each, the second one grows beyond its first.
PROMPTS = {
    group_id: np.arange(3, 3 + length).astype(np.int32) % 17 + 3
    for group_id, length in ((7, 5), (8, 120), (9, 130))
}
NUM_SAMPLES = 4
EPISODES = tuple(EpisodeId(group_id=20, index=index, attempt=index, agent=index % 2) for index in range(4))
"""All have a first turn. The second one of the last has not begun when the engine dies."""
GIVEN = np.array([7, 8, 9, 10], np.int32)
TURN_TOKENS = 6
TOKENS_BEFORE_UPDATE = 30
TOKENS_BEFORE_DEATH = 90


class _Witness:
    """Counts on the engine's thread, before the log is written, what every step samples."""

    def __init__(self, engine: "GeneratorEngine", file: Path) -> None:
        self._recorder = engine._recorder
        self._commands = engine._client._commands
        self._stepped = self._recorder.stepped
        self._recorder.stepped = self.stepped
        self._file = file
        self._loop = asyncio.get_running_loop()
        self.may_update = asyncio.Event()
        self.num_tokens = 0

    def stepped(self, outputs: "EngineCoreOutputs") -> None:
        step = [
            [self._recorder._requests[one.request_id].turn, one.new_token_ids]
            for one in outputs.outputs
            if one.new_token_ids
        ]
        with self._file.open("a") as file:
            file.write(json.dumps(step) + "\n")
        before, self.num_tokens = self.num_tokens, self.num_tokens + sum(len(ids) for _, ids in step)
        if before < TOKENS_BEFORE_UPDATE <= self.num_tokens:
            # No further step before the update's: how fast the event loop is does not matter.
            self._loop.call_soon_threadsafe(self.may_update.set)
            while self._commands.empty():
                time.sleep(0.001)
        if self.num_tokens >= TOKENS_BEFORE_DEATH:
            _die_within_a_write()
        self._stepped(outputs)


def _die_within_a_write() -> None:
    """The next record is torn, and with it all tokens of its step."""
    from forgeasync.rollouts import in_flight

    def write_half(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    in_flight._write = write_half


async def _die(folders: list[Path], log: Path, witness_file: Path) -> None:
    from forgeasync.generator import EngineEpisodes

    engine = await start_engine(folders[0], GENERATOR, RESUMING, in_flight=log)
    episodes = EngineEpisodes(engine)
    await asyncio.gather(*(_turn(episodes, episode, None) for episode in EPISODES))
    witness = _Witness(engine, witness_file)
    groups = asyncio.gather(
        *(_turn(episodes, episode, 0) for episode in EPISODES[:-1]),
        *(_generate(engine, group_id) for group_id in PROMPTS),
    )
    await witness.may_update.wait()
    await update(engine, 1, load_file(folders[1] / "model.safetensors"))
    await groups


def _generate(
    engine: "GeneratorEngine", group_id: int, continued: Sequence[LoggedTurn] = ()
) -> "asyncio.Future[tuple[Rollout, ...]]":
    return engine.generate(
        prompt_ids_P=PROMPTS[group_id],
        num_samples=NUM_SAMPLES,
        sampling=SAMPLING,
        seed=3,
        group_id=group_id,
        continued=continued,
    )


def _turn(
    episodes: "EngineEpisodes", episode: EpisodeId, after: int | None, *, repeated: bool = False
) -> "asyncio.Future[SampledTurn]":
    """The first turn of an episode, or one after another."""
    return episodes.add_turn(
        episode,
        after,
        PROMPTS[7] + episode.index if after is None else GIVEN,
        sampling=SAMPLING,
        max_tokens=TURN_TOKENS if after is None else SAMPLING.max_response_tokens,
        seed=5,
        repeated=repeated,
    )


async def _survive(folders: list[Path], data: dict[int, bytes], log: Path) -> Seen:
    """The groups of the engine that died go on under its last version and under one more."""
    from forgeasync.generator import EngineEpisodes

    seen = Seen()
    engine = await start_engine(folders[0], GENERATOR, RESUMING, in_flight=log)
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    await update(engine, 1, weights[1])
    episodes = EngineEpisodes(engine)
    episodes.restore(20, group_turns(data[20]))
    with pytest.raises(ValueError, match="group_id = 20: is open here already"):
        episodes.restore(20, group_turns(data[20]))
    turns = asyncio.gather(*(_turn(episodes, episode, 0, repeated=True) for episode in EPISODES))
    groups = asyncio.gather(
        *(_generate(engine, group_id, group_turns(data[group_id])) for group_id in PROMPTS)
    )
    await let_decode(engine, 1)
    await update(engine, 2, weights[2])
    seen.continued = dict(zip(PROMPTS, await groups, strict=True))
    seen.second_turns = await turns
    seen.log = read_in_flight(log, [20, *PROMPTS])
    seen.episodes = [branch for (branch,) in await episodes.take(20, EPISODES)]
    for group_id in (20, *PROMPTS):
        engine.forget_group(group_id)
    assert not read_in_flight(log, [20, *PROMPTS]).groups
    engine.shutdown()
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    log: InFlightRead
    steps: list[dict[int, list[int]]]
    """Tokens of every step, by turn, as the witness saw them; the last one is that of the death."""


@pytest.fixture(scope="module")
def death(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Death:
    folder = tmp_path_factory.mktemp("death")
    with pytest.raises(ProcessFailed, match="killed by signal 9"):
        run_alone(_die, folders, folder / "log", folder / "witness")
    lines = (folder / "witness").read_text().splitlines()
    return Death(
        log=read_in_flight(folder / "log", [20, *PROMPTS]), steps=[dict(json.loads(line)) for line in lines]
    )


@pytest.fixture(scope="module")
def survived(folders: list[Path], death: Death, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    log = tmp_path_factory.mktemp("survivor") / "log"
    return run_alone(_survive, folders, dict(death.log.groups), log)


def turns_of(read: InFlightRead) -> dict[tuple[int, int], LoggedTurn]:
    """Of the groups of responses, by group and sample."""
    return {
        (group_id, turn.begun.episode.index): turn
        for group_id in PROMPTS
        for turn in group_turns(read.groups[group_id])
    }


def episodes_of(read: InFlightRead) -> dict[tuple[EpisodeId, int], LoggedTurn]:
    """Turns of episodes, by number."""
    return {(turn.begun.episode, turn.begun.number): turn for turn in group_turns(read.groups[20])}


def test_all_is_kept_but_the_step_of_the_death(death: Death) -> None:
    seen: dict[int, list[int]] = {}
    for step in death.steps[:-1]:
        for turn, ids in step.items():
            seen.setdefault(turn, []).extend(ids)
    turns = turns_of(death.log)
    assert len(turns) == len(PROMPTS) * NUM_SAMPLES
    of_episodes = episodes_of(death.log)
    assert of_episodes.keys() == {(one, 0) for one in EPISODES} | {(one, 1) for one in EPISODES[:-1]}
    first_turns = [turn for (_, number), turn in of_episodes.items() if number == 0]
    assert all(turn.ended is not None for turn in first_turns)
    second_turns = [turn for (_, number), turn in of_episodes.items() if number == 1]
    in_flight = [*turns.values(), *second_turns]
    assert seen == {turn.begun.key: turn.batch.ids_N.tolist() for turn in in_flight if turn.batch is not None}
    num_kept, num_lost = sum(map(len, seen.values())), sum(map(len, death.steps[-1].values()))
    assert death.log.num_kept == num_kept + sum(turn.num_tokens for turn in first_turns)
    assert num_kept + num_lost >= TOKENS_BEFORE_DEATH > num_kept
    assert death.log.num_lost == 0 and death.log.num_torn_bytes > 0
    versions = {int(version) for turn in turns.values() if turn.batch for version in turn.batch.versions_N}
    assert versions == {0, 1}
    assert any(turn.num_parts == 2 for turn in turns.values())
    assert any(turn.ended is None and turn.num_tokens for turn in turns.values())


def test_continued_groups_have_the_old_tokens_with_all_their_records(death: Death, survived: Seen) -> None:
    for (group_id, index), turn in turns_of(death.log).items():
        assert_begins_with(survived.continued[group_id][index], turn)


def test_a_turn_that_is_asked_for_again_goes_on_from_its_tokens(death: Death, survived: Seen) -> None:
    logged = episodes_of(death.log)
    for episode, asked, rollout in zip(EPISODES, survived.second_turns, survived.episodes, strict=True):
        assert asked.turn == 1, "turns keep their numbers"
        given = np.flatnonzero(~rollout.is_sampled_T)
        assert_begins_with(rollout, logged[episode, 0], length=int(given[0]))
        assert rollout.response_ids_T[given].tolist() == GIVEN.tolist()
        assert rollout.response_ids_T[given[-1] + 1 :].tolist() == asked.ids_T.tolist()
        second = logged.get((episode, 1))
        if second is None or second.batch is None:
            continue
        own = slice(given[-1] + 1, given[-1] + 1 + second.num_tokens)
        assert rollout.response_ids_T[own].tolist() == second.batch.ids_N.tolist()
        assert rollout.logprobs_T[own].tobytes() == second.batch.logprobs_N.tobytes()
        old_RMK = np.sort(second.batch.rows_RMK, axis=-1)
        rows = slice(second.begun.first_row, second.begun.first_row + len(old_RMK))
        assert rollout.routed_experts.expert_ids_RMK[rows].tolist() == old_RMK.tolist()
    assert any(turn.num_tokens and turn.ended is None for (_, number), turn in logged.items() if number)
    # The survivor's log has the same turns, with what has come to them.
    assert {key: turn.num_tokens for key, turn in episodes_of(survived.log).items()} == {
        (episode, number): num
        for episode, asked in zip(EPISODES, survived.second_turns, strict=True)
        for number, num in ((0, logged[episode, 0].num_tokens), (1, asked.num_tokens))
    }


def test_every_token_is_what_the_weights_of_its_version_make(
    survived: Seen, models: Models, facts: ModelFacts
) -> None:
    eos = models[0].config.eos_token_id
    seen = set()
    responses = [rollout for group in survived.continued.values() for rollout in group]
    for rollout in (*responses, *survived.episodes):
        check_rollout(rollout, RECORDS, facts)
        assert_recomputed(rollout, models)
    for rollout in responses:
        seen.add(tuple(span.version for span in rollout.version_spans))
        is_cut = rollout.finish_reason is FinishReason.LENGTH
        assert rollout.num_response_tokens <= SAMPLING.max_response_tokens
        assert is_cut == (rollout.response_ids_T[-1] != eos)
        assert not is_cut or rollout.num_response_tokens == SAMPLING.max_response_tokens
    assert any({0, 1} <= set(versions) for versions in seen) and any(2 in versions for versions in seen)


def test_a_log_has_at_the_end_what_the_engine_has_sampled(death: Death, survived: Seen) -> None:
    """Also of what was sampled elsewhere, so that a second death loses nothing either."""
    turns = turns_of(survived.log)
    assert len(turns) == len(PROMPTS) * NUM_SAMPLES
    before = turns_of(death.log)
    for (group_id, index), turn in turns.items():
        assert turn.ended is not None
        assert_begins_with(survived.continued[group_id][index], turn)
        # A request of its own goes on: the same seed would draw the same noise once more.
        old = before[group_id, index]
        new = turn.batch.parts_N[old.num_tokens :]
        assert not len(new) or new.min() >= old.num_parts
