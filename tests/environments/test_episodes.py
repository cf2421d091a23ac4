"""Episodes side by side: how they end, whatever their environment does, and what becomes of their group."""

import asyncio
import dataclasses
import math
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest

from forgeasync.buffer import DropReason
from forgeasync.config import Ending, EndingPolicy, EndingsSection, EpisodesSection, SamplingSection
from forgeasync.environments import (
    Agent,
    AgentRole,
    Agents,
    Environment,
    EpisodeCancelled,
    EpisodeInterrupted,
    Episodes,
    ParseError,
    SingleTurn,
    ToolError,
    Turn,
    TurnRequest,
    build_environment,
    check_environment,
)
from forgeasync.rollouts import (
    AgentOutcome,
    EpisodeId,
    EpisodeOutcome,
    Group,
    SampledTurn,
    Score,
    StoredRollout,
    Task,
)
from forgeasync.runtime import (
    CANCELLED,
    EndedEpisode,
    EpisodeRequest,
    GroupEpisodes,
    HeldOutRollout,
    RefusedGroup,
    SampledGroup,
    Unscored,
)
from forgeasync.schema import ConfigError, PythonCode
from forgeasync.testing import HandTime, ScriptedGenerator
from tests.support.buffer_world import make_task
from tests.support.episodes import AGENT, TOKENIZER, make_episodes
from tests.support.loops import MAX_STEPS, Generators, Recorder, Trainer, make_config, make_run, run_loops
from tests.support.rollouts import make_stored_rollout

TASK = dataclasses.replace(make_task(3), prompt="1 + 2 =")
Sampler = Callable[[EpisodeId, TurnRequest], Awaitable[SampledTurn | None]]
SAMPLING = SamplingSection(max_response_tokens=10)


class Models:
    """A model for every episode and agent that says its episode's index at every turn."""

    def __init__(self) -> None:
        self.by_id: dict[EpisodeId, ScriptedGenerator] = {}
        self.threads: set[int] = set()

    async def __call__(self, episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
        assert episode.group_id == 9
        self.threads.add(threading.get_ident())
        model = self.by_id.setdefault(episode, ScriptedGenerator(TOKENIZER, [str(episode.index)] * 99))
        return await model(request)


class FromFunction(Environment):
    def __init__(self, function: Callable[[Task, Agent], Awaitable[Score]]) -> None:
        self._function = function

    async def rollout(self, task: Task, agent: Agent) -> Score:
        return await self._function(task, agent)


def start(episodes: Episodes, sample: Sampler, *, num_episodes: int) -> "list[asyncio.Task[EpisodeOutcome]]":
    """Begin episodes side by side."""
    return [
        asyncio.ensure_future(
            episodes.run(
                TASK, EpisodeId(group_id=9, index=index), max_turn_tokens=10, sample=sample, keeps_record=True
            )
        )
        for index in range(num_episodes)
    ]


def run(
    rollout: Callable[..., Awaitable[object]] | Environment,
    sample: Sampler | None = None,
    *,
    num_episodes: int = 3,
    **options: Any,
) -> list[EpisodeOutcome]:
    """``options`` are those of ``make_episodes``."""
    environment = rollout if isinstance(rollout, Environment) else FromFunction(rollout)
    episodes = make_episodes(environment, **options)

    async def go() -> list[EpisodeOutcome]:
        return await asyncio.gather(*start(episodes, sample or Models(), num_episodes=num_episodes))

    return asyncio.run(go())


async def run_past_deadline(
    episodes: Episodes,
    clock: HandTime,
    *,
    has_begun: Callable[[], bool] = lambda: True,
) -> EpisodeOutcome:
    """One episode, during which time passes from where it has begun what it does."""
    (running,) = start(episodes, Models(), num_episodes=1)
    await clock.stand_until(has_begun)
    await clock.pass_until(running.done)
    return await running


def values(outcomes: Sequence[EpisodeOutcome]) -> list[float]:
    return [outcome.agents[0].score.value for outcome in outcomes]


async def two_turns(task: Task, agent: Agent) -> Score:
    messages = [{"role": "user", "content": task.prompt}]
    turn = await agent.respond(messages)
    messages += [turn.message, {"role": "user", "content": "again"}]
    turn = await agent.respond(messages)
    return Score(value=float(turn.text), is_correct=turn.text == "2")


def test_each_rollout_has_its_own_score() -> None:
    models = Models()
    outcomes = run(two_turns, models)
    assert values(outcomes) == [0.0, 1.0, 2.0]
    assert [outcome.ending for outcome in outcomes] == [Ending.COMPLETED] * 3
    assert all(outcome.num_turns == 2 and outcome.problem is None for outcome in outcomes)
    assert all(0 < outcome.sampling_s <= outcome.episode_s for outcome in outcomes)
    assert models.threads == {threading.get_ident()}, "turns are sampled on the worker's own loop"
    (branch,) = outcomes[1].record["agents"][0]["branches"]
    assert [(one["role"], one["content"]) for one in branch] == [
        ("user", TASK.prompt),
        ("assistant", "1"),
        ("user", "again"),
        ("assistant", "1"),
    ]
    assert branch[1]["version"] == 0 and branch[1]["num_tokens"] == 2


def only_one(text: str, then: Callable[[], Awaitable[object]]) -> Environment:
    """Goes wrong where the model says this text."""

    async def rollout(task: Task, agent: Agent) -> object:
        turn = await agent.respond(task.prompt)
        if turn.text == text:
            return await then()
        return Score(value=1.0, is_correct=True)

    return FromFunction(rollout)


def raising(error: BaseException) -> Callable[[], Awaitable[Score]]:
    async def raises() -> Score:
        raise error

    return raises


def giving(make: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    async def gives() -> object:
        return make()

    return gives


async def hangs() -> Score:
    await asyncio.sleep(1000)
    return Score(value=1.0, is_correct=True)


async def hangs_on() -> Score:
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        await asyncio.sleep(0)
    return Score(value=1.0, is_correct=True)


async def waits_for_a_process() -> Score:
    subprocess.run(["sleep", "1000"], check=True)
    return Score(value=1.0, is_correct=True)


async def spins() -> Score:
    while True:
        pass


@pytest.mark.parametrize(
    ("then", "ending", "problem"),
    [
        (raising(KeyError("gone")), Ending.ENVIRONMENT_CRASH, "KeyError: 'gone'"),
        (raising(ParseError("no JSON")), Ending.PARSE_ERROR, "ParseError: no JSON"),
        (raising(ToolError("no such tool")), Ending.TOOL_ERROR, "ToolError: no such tool"),
        (raising(EpisodeInterrupted("server gone")), Ending.INFRASTRUCTURE, "server gone"),
        (raising(asyncio.CancelledError()), Ending.ENVIRONMENT_CRASH, "the coroutine was cancelled"),
        (raising(SystemExit(3)), Ending.ENVIRONMENT_CRASH, "SystemExit: 3"),
        (giving(lambda: 1.0), Ending.ENVIRONMENT_CRASH, "rollout returned '1.0'; must return a Score"),
        (giving(lambda: Score(math.nan, True)), Ending.ENVIRONMENT_CRASH, "a score must be finite"),
    ],
)
def test_an_episode_that_goes_wrong_is_named_and_harms_no_other(
    then: Callable[[], Awaitable[object]], ending: Ending, problem: str
) -> None:
    outcomes = run(only_one("1", then))
    assert [outcome.ending for outcome in outcomes] == [Ending.COMPLETED, ending, Ending.COMPLETED]
    assert outcomes[1].problem.startswith(f"environment my.Env, task {TASK.task_id}, rollout 1: ")
    assert problem in outcomes[1].problem and outcomes[1].agents[0].score is None


@pytest.mark.parametrize("then", [hangs, hangs_on, waits_for_a_process])
async def test_an_episode_that_takes_too_long_delays_no_other(
    then: Callable[[], Awaitable[Score]], hand_time: HandTime
) -> None:
    """Nothing of Python can end a wait in C: the process that it waits for is killed."""
    episodes = make_episodes(only_one("1", then), limit_s=0.3, now_s=hand_time)
    running = start(episodes, Models(), num_episodes=3)
    # The clock stands still: whoever ends, ends without the deadline of the one that hangs.
    others = [await running[0], await running[2]]
    await hand_time.pass_until(running[1].done)
    outcomes = [others[0], await running[1], others[1]]
    assert [one.ending for one in outcomes] == [Ending.COMPLETED, Ending.TIMEOUT, Ending.COMPLETED]
    assert "took longer than timeouts.episode_s = 0.3 s" in outcomes[1].problem
    assert outcomes[1].agents[0].score is None


async def test_a_thread_that_spins_is_interrupted_and_one_that_blocks_is_counted(hand_time: HandTime) -> None:
    blocked = threading.Event()

    async def blocks() -> Score:
        blocked.wait()
        return Score(value=1.0, is_correct=True)

    async def run_one(then: Callable[[], Awaitable[Score]]) -> Episodes:
        episodes = make_episodes(only_one("0", then), limit_s=0.3, now_s=hand_time)
        assert (await run_past_deadline(episodes, hand_time)).ending is Ending.TIMEOUT
        return episodes

    try:
        assert (await run_one(blocks)).num_stuck == 1
    finally:
        blocked.set()
    spinning = await run_one(spins)
    await hand_time.stand_until(lambda: not spinning.num_stuck)


@pytest.mark.parametrize("key", ["setup_s", "step_s"])
async def test_every_part_of_an_episode_has_its_deadline(key: str, hand_time: HandTime) -> None:
    waits = threading.Event()

    async def wait() -> None:
        waits.set()
        await asyncio.Event().wait()

    async def rollout(task: Task, agent: Agent) -> Score:
        if key == "setup_s":
            await wait()
        await agent.respond(task.prompt)
        await wait()
        return Score(value=0.0, is_correct=False)

    section = EpisodesSection(**{key: 0.2})
    episodes = make_episodes(FromFunction(rollout), section=section, now_s=hand_time)
    outcome = await run_past_deadline(episodes, hand_time, has_begun=waits.is_set)
    assert outcome.ending is Ending.TIMEOUT and f"took longer than episodes.{key} = 0.2 s" in outcome.problem


async def test_a_slow_model_is_not_the_environments_fault(hand_time: HandTime) -> None:
    models = Models()

    async def slow(episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
        hand_time.advance(3.0)
        # The episode looks at its deadlines meanwhile.
        for _ in range(5):
            await asyncio.sleep(0)
        return await models(episode, request)

    section = EpisodesSection(setup_s=0.1, step_s=0.1)
    episodes = make_episodes(FromFunction(two_turns), section=section, now_s=hand_time)
    outcome = await start(episodes, slow, num_episodes=1)[0]
    assert outcome.ending is Ending.COMPLETED and outcome.sampling_s == outcome.episode_s == 6.0


async def no_turn(task: Task, agent: Agent) -> Score:
    return Score(value=1.0, is_correct=True)


@pytest.mark.parametrize(
    ("rollout", "max_context_length", "problem"),
    [
        (no_turn, 100, "ended without a turn of the model"),
        # A prompt that fills the context is no truncation.
        (two_turns, 1, "model.max_context_length = 1 leaves no room"),
    ],
)
def test_an_episode_without_a_turn_is_a_crash(
    rollout: Callable[..., Awaitable[Score]], max_context_length: int, problem: str
) -> None:
    (outcome,) = run(rollout, max_context_length=max_context_length, num_episodes=1)
    assert outcome.ending is Ending.ENVIRONMENT_CRASH and problem in outcome.problem


async def talk_on(task: Task, agent: Agent) -> Score:
    messages = [{"role": "user", "content": task.prompt}]
    while True:
        turn = await agent.respond(messages)
        messages += [turn.message, {"role": "user", "content": "more"}]


@pytest.mark.parametrize(
    ("bounds", "ending"),
    [
        ({"max_context_length": 40}, Ending.LENGTH),
        ({"section": EpisodesSection(max_turns=3)}, Ending.MAX_TURNS),
    ],
)
def test_a_bound_that_the_environment_expects_is_scored(bounds: Mapping[str, object], ending: Ending) -> None:
    async def rollout(task: Task, agent: Agent) -> Score:
        try:
            return await talk_on(task, agent)
        except RuntimeError:
            return Score(value=0.25, is_correct=False)

    assert all(one.ending is ending and one.agents[0].score is None for one in run(talk_on, **bounds))
    outcomes = run(rollout, **bounds)
    assert all(one.ending is ending for one in outcomes) and values(outcomes) == [0.25] * 3


def without_the_turn(*, goes_on: bool) -> Environment:
    """Has a turn that fails; goes on without it, or not."""

    async def rollout(task: Task, agent: Agent) -> Score:
        try:
            return await two_turns(task, agent)
        except Exception:
            if goes_on:
                return Score(value=1.0, is_correct=True)
            raise

    return FromFunction(rollout)


async def given_up(episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
    return None


async def dead(episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
    raise ConnectionError("the engine is dead")


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(
    ("sample", "error", "words"),
    [(given_up, EpisodeCancelled, None), (dead, ConnectionError, "the engine is dead")],
)
def test_what_happens_to_a_turn_is_not_the_environments_fault(
    sample: Sampler, error: type[Exception], words: str | None, goes_on: bool
) -> None:
    with pytest.raises(error, match=words):
        run(without_the_turn(goes_on=goes_on), sample)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_turn_that_is_lost_with_its_generator_ends_the_episode_alone(goes_on: bool) -> None:
    """The run goes on, and no score counts that an environment gives without the turn."""
    models = Models()

    async def sample(episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
        if episode.index == 1:
            raise EpisodeInterrupted("its generator is gone")
        return await models(episode, request)

    outcomes = run(without_the_turn(goes_on=goes_on), sample)
    assert [one.ending for one in outcomes] == [Ending.COMPLETED, Ending.INFRASTRUCTURE, Ending.COMPLETED]
    assert outcomes[1].agents[0].score is None
    assert "its generator is gone" in str(outcomes[1].problem)


def test_an_agent_of_an_episode_that_is_over_does_not_answer() -> None:
    agents: list[Agent] = []

    async def rollout(task: Task, agent: Agent) -> Score:
        agents.append(agent)
        return await two_turns(task, agent)

    run(rollout, num_episodes=1)
    with pytest.raises(RuntimeError, match="after the episode had ended"):
        asyncio.run(agents[0].respond("once more"))


def test_agents_have_scores_of_their_own() -> None:
    roles = (AgentRole(name="solver", is_trainable=True), AgentRole(name="judge", is_trainable=True))

    async def rollout(task: Task, agents: Agents) -> Mapping[str, Score]:
        await agents.solver.respond(task.prompt)
        verdict = await agents.judge.respond("is this right?")
        with pytest.raises(AttributeError, match="no agent 'critic'; agents of the config has solver, judge"):
            await agents.critic.respond("?")
        return {
            "solver": Score(value=float(verdict.text), is_correct=True),
            "judge": Score(value=-1.0, is_correct=False),
        }

    models = Models()
    outcomes = run(rollout, models, roles=roles)
    assert [[agent.score.value for agent in one.agents] for one in outcomes] == [[0, -1], [1, -1], [2, -1]]
    assert {episode.agent for episode in models.by_id} == {0, 1}

    async def forgets_the_judge(task: Task, agents: Agents) -> Mapping[str, Score]:
        await agents.solver.respond(task.prompt)
        return {"solver": Score(value=1.0, is_correct=True)}

    (outcome,) = run(forgets_the_judge, roles=roles, num_episodes=1)
    assert "must have one for each of ['judge', 'solver']" in outcome.problem


@pytest.mark.parametrize("is_async", [False, True])
def test_a_single_turn_is_scored_by_its_reward(is_async: bool) -> None:
    def reward(task: Task, turn: Turn) -> Score:
        return Score(value=len(task.prompt) + float(turn.text), is_correct=turn.num_tokens == 2)

    async def slow(task: Task, turn: Turn) -> Score:
        await asyncio.sleep(0)
        return reward(task, turn)

    outcomes = run(SingleTurn(slow if is_async else reward))
    assert values(outcomes) == [len(TASK.prompt) + index for index in range(3)]
    assert all(one.num_turns == 1 and one.agents[0].score.is_correct for one in outcomes)


# ---- from a config


class Sound(Environment):
    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus

    async def rollout(self, task: Task, agent: Agent) -> Score:
        turn = await agent.respond(task.prompt)
        return Score(value=float(turn.text) + self.bonus, is_correct=False)


async def as_function(task: Task, agent: Agent, bonus: float = 0.0) -> Score:
    return await Sound(bonus).rollout(task, agent)


class NotAsync(Environment):
    def rollout(self, task: Task, agent: Agent) -> Score:
        return Score(value=1.0, is_correct=True)


class TooFew(Environment):
    async def rollout(self, task: Task) -> Score:
        return Score(value=1.0, is_correct=True)


class WithoutRollout(Environment):
    pass


class BreaksWhenBuilt(Sound):
    def __init__(self) -> None:
        raise OSError("no such server")


def not_async(task: Task, agent: Agent) -> Score:
    return Score(value=1.0, is_correct=True)


@pytest.mark.parametrize("name", ["Sound", "as_function"])
def test_an_environment_is_built_from_its_section(name: str) -> None:
    section = PythonCode(factory=f"tests.environments.test_episodes.{name}", options={"bonus": 5.0})
    assert not list(check_environment(section))
    results = run(build_environment(section))
    assert values(results) == [5.0, 6.0, 7.0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("NotAsync", "NotAsync.rollout must be asynchronous"),
        ("TooFew", "must take (task, agent)"),
        ("WithoutRollout", "abstract"),
        ("BreaksWhenBuilt", "OSError: no such server"),
        ("not_async", "neither an Environment nor an async function"),
        ("TASK", "is a Task; must be a class or a function"),
        ("Nothing", "has no 'Nothing'"),
    ],
)
def test_what_is_no_environment_is_refused_before_a_run(name: str, problem: str) -> None:
    (found,) = check_environment(PythonCode(factory=f"tests.environments.test_episodes.{name}"))
    assert found.field == "environment.factory" and problem in str(found)


def test_a_config_with_an_environment_is_checked_with_the_rest() -> None:
    from forgeasync.controller import check

    config = make_config("environment={kind: python, factory: tests.environments.test_episodes.NotAsync}")
    with pytest.raises(ConfigError, match=r"environment.factory = .*must be asynchronous"):
        check(config)


# ---- in the loops of a run


class ScriptedEpisodes:
    """Groups whose episodes have random scores; some fail, and some are given up."""

    def __init__(self, generators: Generators, *, failing: Callable[[int], bool]) -> None:
        """They are sampled under the version that the generators have."""
        self._generators = generators
        self._failing = failing
        self._rng = np.random.default_rng(0)

    async def sample(self, group_id: int, task: Task, *, seed: int | None) -> SampledGroup | RefusedGroup:
        if self._failing(group_id):
            return RefusedGroup(problem=f"group {group_id}: no tool", reason=DropReason.EPISODE_FAILED)
        version = min(self._generators._fetched)
        scores = tuple(Score(value=value, is_correct=False) for value in self._rng.normal(size=4))
        return SampledGroup(
            rollouts=tuple(make_stored_rollout((version, 0, 3), (version, 5, 7)) for _ in scores),
            scores=scores,
            outcomes=tuple(outcome_of(Ending.COMPLETED, score.value) for score in scores),
        )

    async def score(
        self, task: Task, *, sampling: SamplingSection, seed: int | None, keeps_record: bool = False
    ) -> HeldOutRollout:
        failed, done = Unscored(reason="no tool"), Score(value=0.5, is_correct=True)
        return HeldOutRollout(result=failed if task.prompt == "1" else done)


class NobodyScores:
    """Whoever has something scored gets an error."""

    def metrics(self) -> dict[str, float]:
        return {}


def test_groups_of_episodes_skip_the_scorer() -> None:
    trainer, recorder, generators = Trainer(), Recorder(), Generators()
    grpo = make_run(
        make_config(),
        generators=generators,
        trainer=trainer,
        recorder=recorder,
        held_out=[dataclasses.replace(make_task(number), prompt=str(number)) for number in (0, 1, 2)],
        groups=ScriptedEpisodes(generators, failing=lambda group_id: group_id == 1),
    )
    grpo.scorer = NobodyScores()
    run_loops(grpo)
    assert len(trainer.steps) == MAX_STEPS
    assert recorder.problems == ["group 1: no tool"]
    assert recorder.accuracies[0] == 1.0, "a held-out episode that fails is left out"
    trained = [item for step in trainer.steps for item in step]
    assert all(item.branch.num_sampled_tokens == 5 and item.num_tokens == 8 for item in trained)
    assert len(recorder.outcomes) >= len(trained) and recorder.rewards
    over = {1} | {group.group_id for batch in recorder.batches for group in batch.groups}
    assert over <= {1, *recorder.kept_records} and len(set(recorder.kept_records)) > MAX_STEPS
    assert over <= recorder.forgotten_records and not recorder.live_records & over, (
        "episodes of groups that have trained are not held any longer"
    )


async def test_episodes_of_groups_that_the_buffer_drops_are_forgotten() -> None:
    recorder = Recorder()
    grpo = make_run(make_config(), recorder=recorder)
    lost = [
        Group(group_id=number, draw_id=0, task=TASK, rollouts=(make_stored_rollout((0, 0, 4)),))
        for number in (3, 5)
    ]
    for group in lost:
        await grpo.payloads.reserve(group.group_id)
    await grpo.lifecycle.lose(lost)
    assert recorder.forgotten_records == {3, 5}


# ---- what becomes of endings


def outcome_of(ending: Ending, value: float | None = None) -> EpisodeOutcome:
    score = None if value is None else Score(value=value, is_correct=True)
    agent = AgentOutcome(score=score, num_turns=2)
    problem = None if ending is Ending.COMPLETED else f"it is {ending}"
    return EpisodeOutcome(ending=ending, agents=(agent,), episode_s=1.0, sampling_s=0.5, problem=problem)


DONE = outcome_of(Ending.COMPLETED, 1.0)


class ScriptedPool:
    """Says how the attempts at each episode end."""

    def __init__(self, script: Mapping[int, Sequence[EpisodeOutcome | None]]) -> None:
        self._script = script
        self.requests: list[EpisodeRequest] = []

    def forget_moves(self, group_id: int) -> None:
        pass

    async def run_episode(self, request: EpisodeRequest) -> EpisodeOutcome | None:
        self.requests.append(request)
        await asyncio.sleep(0)
        return self._script[request.episode.index][request.episode.attempt]


R = TypeVar("R")


class PinnedReplica:
    """A generator that is never lost."""

    rank, number, actor, name = 7, 70, None, "generator 7"

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.groups: set[int] = set()

    async def call(self, call: Callable[[], Awaitable[R]]) -> R:
        return await call()


class PinningRouter:
    """Hands out one generator, stores what it is told, and remembers what it is to forget."""

    def __init__(self) -> None:
        self.dropped_groups: list[tuple[int, int]] = []
        self.dropped: list[tuple[int, int]] = []
        """Episode and attempt."""
        self.stored: list[EndedEpisode] = []

    @asynccontextmanager
    async def pinned(self, num_samples: int, group_id: int | None = None) -> AsyncIterator[PinnedReplica]:
        yield PinnedReplica()

    @contextmanager
    def cancellable(self, group_id: int) -> Iterator[Callable[[], bool]]:
        yield lambda: False

    async def drop_episodes(self, replica: PinnedReplica, group_id: int) -> None:
        self.dropped_groups.append((replica.rank, group_id))

    async def drop_episode(self, replica: PinnedReplica, episode: EpisodeId) -> None:
        self.dropped.append((episode.index, episode.attempt))

    async def store_episodes(
        self, replica: PinnedReplica, group_id: int, ended: Sequence[EndedEpisode]
    ) -> tuple[StoredRollout, ...]:
        self.stored = list(ended)
        return tuple(make_stored_rollout((0, 0, 7), text="said") for _ in ended)


def make_groups(
    pool: ScriptedPool, router: PinningRouter, *, group_size: int, keeps_texts: bool = True, **section: Any
) -> GroupEpisodes:
    return GroupEpisodes(
        pool,
        router,
        roles=AGENT,
        group_size=group_size,
        sampling=SAMPLING,
        section=EpisodesSection(**section),
        max_lost_per_group=3,
        keeps_texts=keeps_texts,
    )


def sample_group(
    script: Mapping[int, Sequence[EpisodeOutcome | None]],
    *,
    keeps_texts: bool = True,
    **endings: EndingPolicy,
) -> tuple[SampledGroup | RefusedGroup, ScriptedPool, PinningRouter]:
    pool, router = ScriptedPool(script), PinningRouter()
    section = {"max_attempts": 3, "endings": EndingsSection(**endings)}
    groups = make_groups(pool, router, group_size=len(script), keeps_texts=keeps_texts, **section)
    return asyncio.run(groups.sample(5, TASK, seed=3)), pool, router


def test_infrastructure_is_run_again_and_never_scored() -> None:
    lost = outcome_of(Ending.INFRASTRUCTURE, 0.0)
    answer, pool, router = sample_group({0: [DONE], 1: [lost, lost, DONE], 2: [lost, lost, lost]})
    assert isinstance(answer, SampledGroup)
    # The third episode has had its attempts: its siblings train without it.
    assert [(one.episode.index, one.episode.attempt) for one in router.stored] == [(0, 0), (1, 2)]
    assert [score.value for score in answer.scores] == [1.0, 1.0]
    assert router.dropped == [(1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]
    assert len(answer.outcomes) == 7
    assert {(request.task, request.seed) for request in pool.requests} == {(TASK, 3)}


def test_a_group_of_one_trains_if_somebody_has_scored_it() -> None:
    """What people have said can stay where it was said."""
    answer, pool, _ = sample_group({0: [DONE]})
    assert isinstance(answer, SampledGroup) and [score.value for score in answer.scores] == [1.0]
    assert pool.requests[0].keeps_record and answer.rollouts[0].text
    answer, pool, _ = sample_group({0: [DONE]}, keeps_texts=False)
    assert isinstance(answer, SampledGroup) and not pool.requests[0].keeps_record
    assert all(branch.text == "" for rollout in answer.rollouts for branch in rollout.branches)
    assert all(rollout.num_sampled_tokens for rollout in answer.rollouts)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (EndingPolicy.SCORE, {0: 1.0, 1: 0.5, 2: 1.0}),
        (EndingPolicy.ZERO, {0: 1.0, 1: 0.0, 2: 1.0}),
        (EndingPolicy.MASK, {0: 1.0, 2: 1.0}),
        (EndingPolicy.RUN_AGAIN, {0: 1.0, 1: 0.25, 2: 1.0}),
    ],
)
def test_an_ending_means_what_its_policy_says(policy: EndingPolicy, expected: dict[int, float]) -> None:
    second = [outcome_of(Ending.TOOL_ERROR, 0.5), outcome_of(Ending.COMPLETED, 0.25)]
    answer, _, router = sample_group({0: [DONE], 1: second, 2: [DONE]}, tool_error=policy)
    assert isinstance(answer, SampledGroup)
    found = zip(router.stored, answer.scores, strict=True)
    assert {one.episode.index: score.value for one, score in found} == expected


def test_a_score_that_is_missing_counts_as_none() -> None:
    answer, _, router = sample_group({0: [DONE], 1: [outcome_of(Ending.LENGTH)]})
    assert [score.value for score in answer.scores] == [1.0, 0.0]
    assert [one.is_truncated for one in router.stored] == [False, True]


@pytest.mark.parametrize(
    ("endings", "reason", "problem"),
    [
        # Of a larger group two episodes must be left, whatever ended the others.
        ([Ending.COMPLETED, Ending.TIMEOUT, Ending.TIMEOUT], DropReason.EPISODE_FAILED, "it is timeout"),
        ([Ending.COMPLETED, Ending.NO_SCORE], DropReason.NO_SCORE, None),
        ([Ending.TIMEOUT], DropReason.EPISODE_FAILED, "it is timeout"),
        # Nothing went wrong.
        ([Ending.NO_SCORE], DropReason.NO_SCORE, None),
    ],
)
def test_a_group_without_enough_episodes_is_given_up(
    endings: list[Ending], reason: DropReason, problem: str | None
) -> None:
    script = {
        index: [DONE if ending is Ending.COMPLETED else outcome_of(ending)]
        for index, ending in enumerate(endings)
    }
    answer, _, router = sample_group(script)
    assert isinstance(answer, RefusedGroup) and len(answer.outcomes) == len(endings)
    assert (answer.reason, answer.problem) == (reason, problem and f"group 5: {problem}")
    assert router.dropped_groups == [(7, 5)] and not router.stored


def test_a_group_that_is_given_up_meanwhile_is_dropped() -> None:
    answer, _, router = sample_group({0: [DONE], 1: [None]})
    assert answer == CANCELLED and router.dropped_groups == [(7, 5)]


async def test_an_evaluation_set_is_sampled_in_its_own_way() -> None:
    greedy = SamplingSection(max_response_tokens=7, temperature=0.1)
    pool, router = ScriptedPool({0: [DONE]}), PinningRouter()
    groups = make_groups(pool, router, group_size=4)
    found = [await groups.score(TASK, sampling=greedy, seed=3) for _ in range(2)]
    assert all(isinstance(one.result, Score) and one.ending is Ending.COMPLETED for one in found)
    assert [(one.sampling, one.seed, one.generator_number) for one in pool.requests] == [(greedy, 3, 70)] * 2
    ids = [one.episode.group_id for one in pool.requests]
    assert ids == [-1, -2] and router.dropped_groups == [(7, -1), (7, -2)]
    pool._script = {0: [outcome_of(Ending.TIMEOUT)]}
    failed = await groups.score(TASK, sampling=greedy, seed=3)
    assert isinstance(failed.result, Unscored) and failed.ending is Ending.TIMEOUT
    assert f"{TASK.task_id} failed: it is timeout" in failed.result.reason
