"""Episodes side by side: what a group is worth when one of them raises, hangs, is cut or is given up."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from forgeasync.actors.environment import SampledGroup
from forgeasync.actors.generator import CancelledGroup, RefusedGroup
from forgeasync.actors.group_sampling import GroupEpisodes
from forgeasync.actors.group_scoring import Unscored
from forgeasync.buffer.decisions import DropReason
from forgeasync.buffer.starvation import NothingTrains
from forgeasync.config.generator import SamplingSection
from forgeasync.config.run import TimeoutSection
from forgeasync.environments.build import build_environment, check_environment
from forgeasync.environments.conversation import MessageRenderer
from forgeasync.environments.environment import Agent, Environment, Turn
from forgeasync.environments.episodes import (
    EpisodeFailed,
    EpisodeResult,
    Episodes,
    EpisodesCancelled,
)
from forgeasync.environments.single_turn import SingleTurn
from forgeasync.rollouts.score import Score
from forgeasync.rollouts.task import Task
from forgeasync.rollouts.trajectory import EpisodeId, SampledTurn
from forgeasync.schema.problems import ConfigError
from forgeasync.schema.python_code import PythonCode
from tests.support.buffer_world import make_task
from tests.support.chat import ScriptedModel, make_tokenizer
from tests.support.loops import MAX_STEPS, Endpoint, Generators, Recorder, Trainer, make_config, make_run
from tests.support.rollouts import make_stored_rollout

TOKENIZER = make_tokenizer(None)
TASK = dataclasses.replace(make_task(3), prompt="1 + 2 =")
Sampler = Callable[[EpisodeId, np.ndarray, int], Awaitable[SampledTurn | None]]


class Models:
    """A model for every episode that says its index at every turn."""

    def __init__(self) -> None:
        self.by_index: dict[int, ScriptedModel] = {}

    async def __call__(
        self, episode: EpisodeId, given_ids: np.ndarray, max_tokens: int
    ) -> SampledTurn | None:
        assert episode.group_id == 9
        model = self.by_index.setdefault(episode.index, ScriptedModel(TOKENIZER, [str(episode.index)] * 99))
        return await model(given_ids, max_tokens)


class FromFunction(Environment):
    def __init__(self, function: Callable[[Task, Agent], Awaitable[Score]]) -> None:
        self._function = function

    async def rollout(self, task: Task, agent: Agent) -> Score:
        return await self._function(task, agent)


def run(
    rollout: Callable[[Task, Agent], Awaitable[Score]] | Environment,
    sample: Sampler | None = None,
    *,
    num_episodes: int = 3,
    limit_s: float = 20.0,
    max_context_length: int = 100,
) -> tuple[EpisodeResult, ...]:
    episodes = Episodes(
        rollout if isinstance(rollout, Environment) else FromFunction(rollout),
        MessageRenderer(TOKENIZER, chat_template=False),
        name="my.Env",
        max_context_length=max_context_length,
        limit_s=limit_s,
    )
    return asyncio.run(
        episodes.run(
            TASK,
            group_id=9,
            num_episodes=num_episodes,
            max_turn_tokens=10,
            sample=sample or Models(),
        )
    )


async def two_turns(task: Task, agent: Agent) -> Score:
    messages = [{"role": "user", "content": task.prompt}]
    turn = await agent.respond(messages)
    messages += [turn.message, {"role": "user", "content": "again"}]
    turn = await agent.respond(messages)
    return Score(value=float(turn.text), is_correct=turn.text == "2")


def test_each_rollout_has_its_own_score() -> None:
    results = run(two_turns)
    assert [result.score.value for result in results] == [0.0, 1.0, 2.0]
    assert [result.score.is_correct for result in results] == [False, False, True]
    assert all(result.num_turns == 2 and not result.is_truncated for result in results)
    assert all(0 < result.episode_s < 20 for result in results)


def only_one(text: str, then: Callable[[], Awaitable[Score]]) -> Environment:
    """Goes wrong where the model says this text."""

    async def rollout(task: Task, agent: Agent) -> Score:
        turn = await agent.respond(task.prompt)
        if turn.text == text:
            return await then()
        return Score(value=1.0, is_correct=True)

    return FromFunction(rollout)


async def raises() -> Score:
    raise KeyError("gone")


async def returns_number() -> Score:
    return 1.0


async def not_a_number() -> Score:
    return Score(value=float("nan"), is_correct=True)


async def cancels_itself() -> Score:
    raise asyncio.CancelledError


async def hangs() -> Score:
    await asyncio.sleep(1000)
    return Score(value=1.0, is_correct=True)


async def hangs_on() -> Score:
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        await asyncio.sleep(0.4)
    return Score(value=1.0, is_correct=True)


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        (raises, "KeyError: 'gone'"),
        (returns_number, "rollout returned '1.0'; must return a Score"),
        (not_a_number, "a score must be finite"),
        (cancels_itself, "CancelledError"),
        (hangs, r"took longer than timeouts.episode_s = 0.2 s"),
        (hangs_on, r"took longer than timeouts.episode_s = 0.2 s"),
    ],
)
def test_an_episode_that_goes_wrong_is_named(then: Callable[[], Awaitable[Score]], problem: str) -> None:
    with pytest.raises(
        EpisodeFailed, match=rf"environment my.Env, task {TASK.task_id}, rollout 1: .*{problem}"
    ):
        run(only_one("1", then), limit_s=0.2 if then in (hangs, hangs_on) else 20.0)


def test_a_failure_ends_the_other_episodes() -> None:
    ended = []

    async def rollout(task: Task, agent: Agent) -> Score:
        turn = await agent.respond(task.prompt)
        if turn.text == "1":
            raise KeyError("gone")
        try:
            return await hangs()
        finally:
            ended.append(turn.text)

    start_s = time.perf_counter()
    with pytest.raises(EpisodeFailed):
        run(rollout)
    assert sorted(ended) == ["0", "2"] and time.perf_counter() - start_s < 15


def test_an_episode_without_a_turn_fails() -> None:
    async def rollout(task: Task, agent: Agent) -> Score:
        return Score(value=1.0, is_correct=True)

    with pytest.raises(EpisodeFailed, match="ended without a turn of the model"):
        run(rollout)


async def talk_on(task: Task, agent: Agent) -> Score:
    messages = [{"role": "user", "content": task.prompt}]
    while True:
        turn = await agent.respond(messages)
        messages += [turn.message, {"role": "user", "content": "more"}]


def test_a_full_context_truncates_an_episode() -> None:
    """By hand: a prompt, then 2 tokens a turn and a newline and 4 characters between turns."""
    num_prompt = len(TOKENIZER(TASK.prompt, add_special_tokens=False)["input_ids"])
    results = run(talk_on, max_context_length=num_prompt + 2 + 7 + 7 + 5)
    assert [result.score for result in results] == [Score(value=0.0, is_correct=False)] * 3
    assert all(result.is_truncated and result.num_turns == 3 for result in results)


def test_a_full_context_that_the_environment_expects_is_scored() -> None:
    async def rollout(task: Task, agent: Agent) -> Score:
        try:
            return await talk_on(task, agent)
        except RuntimeError:
            return Score(value=0.25, is_correct=False)

    results = run(rollout)
    assert all(result.score.value == 0.25 and not result.is_truncated for result in results)


def test_a_prompt_that_fills_the_context_is_no_truncation() -> None:
    with pytest.raises(
        EpisodeFailed, match=r"rollout 0: the conversation has .* model.max_context_length = 1"
    ):
        run(two_turns, max_context_length=1)


@pytest.mark.parametrize("swallows", [False, True])
def test_a_group_that_is_given_up_is_no_failure(swallows: bool) -> None:
    """Nor one of the environment where it goes on without the model."""
    models = Models()

    async def sample(episode: EpisodeId, given_ids: np.ndarray, max_tokens: int) -> SampledTurn | None:
        return None if episode.index == 1 else await models(episode, given_ids, max_tokens)

    async def rollout(task: Task, agent: Agent) -> Score:
        try:
            return await two_turns(task, agent)
        except RuntimeError:
            if swallows:
                return Score(value=1.0, is_correct=True)
            raise

    with pytest.raises(EpisodesCancelled):
        run(rollout, sample)


@pytest.mark.parametrize("swallows", [False, True])
def test_a_generator_that_fails_is_not_the_environments_fault(swallows: bool) -> None:
    async def sample(episode: EpisodeId, given_ids: np.ndarray, max_tokens: int) -> SampledTurn | None:
        raise ConnectionError("the engine is dead")

    async def rollout(task: Task, agent: Agent) -> Score:
        try:
            return await two_turns(task, agent)
        except ConnectionError:
            if swallows:
                return Score(value=1.0, is_correct=True)
            raise

    with pytest.raises(ConnectionError, match="the engine is dead"):
        run(rollout, sample)


def test_an_agent_of_an_episode_that_is_over_does_not_answer() -> None:
    agents: list[Agent] = []

    async def rollout(task: Task, agent: Agent) -> Score:
        agents.append(agent)
        await agent.respond(task.prompt)
        return Score(value=1.0, is_correct=True)

    run(rollout, num_episodes=1)
    with pytest.raises(RuntimeError, match="after the episode had ended"):
        asyncio.run(agents[0].respond("once more"))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_single_turn_is_scored_by_its_reward(is_async: bool) -> None:
    def reward(task: Task, turn: Turn) -> Score:
        return Score(value=len(task.prompt) + float(turn.text), is_correct=turn.num_tokens == 2)

    async def slow(task: Task, turn: Turn) -> Score:
        await asyncio.sleep(0)
        return reward(task, turn)

    models = Models()
    results = run(SingleTurn(slow if is_async else reward), models)
    assert [result.score.value for result in results] == [len(TASK.prompt) + index for index in range(3)]
    assert all(result.num_turns == 1 and result.score.is_correct for result in results)


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
    assert [result.score.value for result in results] == [5.0, 6.0, 7.0]


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


def test_a_config_with_an_environment_is_checked_with_the_rest(tmp_path: Path) -> None:
    from forgeasync.controller.preparation import check

    config = make_config(
        tmp_path, "environment={kind: python, factory: tests.environments.test_episodes.NotAsync}"
    )
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
        self.seeds: list[int | None] = []

    async def sample(
        self, group_id: int, task: Task, *, seed: int | None
    ) -> SampledGroup | RefusedGroup | CancelledGroup:
        self.seeds.append(seed)
        if self._failing(group_id):
            return RefusedGroup(problem=f"group {group_id}: no tool", reason=DropReason.EPISODE_FAILED)
        version = min(self._generators._fetched)
        scores = [Score(value=value, is_correct=False) for value in self._rng.normal(size=4)]
        return SampledGroup(
            rollouts=tuple(make_stored_rollout((version, 0, 3), (version, 5, 7)) for _ in scores),
            results=tuple(
                EpisodeResult(score=score, num_turns=2, is_truncated=False, episode_s=1.0) for score in scores
            ),
        )

    async def score(self, task: Task, *, sampling: SamplingSection, seed: int | None) -> Score | Unscored:
        return Unscored(reason="no tool") if task.prompt == "1" else Score(value=0.5, is_correct=True)


class EpisodeRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.results: list[EpisodeResult] = []

    def record_episodes(self, results: tuple[EpisodeResult, ...]) -> None:
        self.results += results


class OnlyForEpisodes:
    """A fleet that is never watched to its end."""

    async def watch(self) -> None:
        await asyncio.Event().wait()


class NobodyScores:
    """Whoever has something scored gets an error."""

    def metrics(self) -> dict[str, float]:
        return {}


def test_groups_of_episodes_skip_the_scorer(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    trainer, recorder = Trainer(), EpisodeRecorder()
    held_out = [dataclasses.replace(make_task(number), prompt=str(number)) for number in (0, 1, 2)]

    async def go() -> None:
        generators = Generators()
        grpo = make_run(config, generators=generators, trainer=trainer, recorder=recorder, held_out=held_out)
        grpo.groups = ScriptedEpisodes(generators, failing=lambda group_id: group_id == 1)
        grpo.scorer = NobodyScores()
        await asyncio.wait_for(grpo.run(OnlyForEpisodes()), 20)

    asyncio.run(go())
    assert len(trainer.steps) == MAX_STEPS
    assert recorder.problems == ["group 1: no tool"]
    assert recorder.accuracies[0] == 1.0, "a held-out episode that fails is left out"
    trained = [item for step in trainer.steps for item in step]
    assert all(item.rollout.num_sampled_tokens == 5 and item.num_tokens == 8 for item in trained)
    assert len(recorder.results) >= len(trained) and recorder.rewards


def test_episodes_that_always_fail_end_the_run(tmp_path: Path) -> None:
    config = make_config(tmp_path, "buffer.max_given_up_in_a_row=5")

    async def go() -> None:
        grpo = make_run(config, recorder=EpisodeRecorder())
        grpo.groups = ScriptedEpisodes(Generators(), failing=lambda group_id: True)
        await asyncio.wait_for(grpo.run(OnlyForEpisodes()), 20)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(go())
    assert caught.group_contains(NothingTrains, match=r"5 groups in a row .*episode_failed.*no tool")


# ---- the controller's side


class PinningRouter:
    """Hands out one rank and remembers what it is to forget."""

    def __init__(self) -> None:
        self.num_pinned = 0
        self.dropped: list[tuple[int, int]] = []

    def pinned(self, num_samples: int) -> "PinningRouter":
        self.num_pinned += num_samples
        return self

    def __enter__(self) -> int:
        return 7

    def __exit__(self, *exception: object) -> None:
        self.num_pinned -= 4

    async def drop_episodes(self, rank: int, group_id: int) -> None:
        self.dropped.append((rank, group_id))


def test_an_environment_that_does_not_answer_costs_one_group() -> None:
    """It blocks its event loop, so that its own deadlines do not come to pass."""

    async def never(*arguments: object) -> None:
        await asyncio.sleep(1000)

    class Stuck:
        run_group = Endpoint(never)
        evaluate = Endpoint(never)

    router = PinningRouter()
    timeouts = TimeoutSection(episode_s=0.1, generate_s=0.1)

    async def go() -> None:
        groups = GroupEpisodes(Stuck(), router, group_size=4, timeouts=timeouts)
        answer = await groups.sample(5, TASK, seed=None)
        assert isinstance(answer, RefusedGroup) and answer.reason is DropReason.EPISODE_FAILED
        assert "group 5 took longer than 0.2 s; timeouts.episode_s + timeouts.generate_s" in answer.problem
        assert router.dropped == [(7, 5)]
        held_out = await groups.score(TASK, sampling=SamplingSection(max_response_tokens=10), seed=0)
        assert isinstance(held_out, Unscored) and TASK.task_id in held_out.reason

    asyncio.run(go())


def test_an_evaluation_set_is_sampled_in_its_own_way() -> None:
    asked: list[object] = []

    async def evaluate(task: Task, rank: int, sampling: SamplingSection, seed: int) -> EpisodeResult:
        asked.append((rank, sampling, seed))
        return EpisodeResult(
            score=Score(value=1.0, is_correct=True), num_turns=1, is_truncated=False, episode_s=0.1
        )

    class Actor:
        pass

    greedy = SamplingSection(max_response_tokens=7, temperature=0.1)
    actor = Actor()
    actor.evaluate = Endpoint(evaluate)
    groups = GroupEpisodes(actor, PinningRouter(), group_size=4, timeouts=TimeoutSection())
    found = asyncio.run(groups.score(TASK, sampling=greedy, seed=3))
    assert isinstance(found, Score) and asked == [(7, greedy, 3)]
