"""Rewards of a user's own: what they are given, what they may return, and how they may fail."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.config import (
    MathReward,
    PythonReward,
    RewardSection,
    ScoredUnit,
    ScorerSection,
    check_without_model,
    dump_config,
    load_config,
    named_sets,
    named_sources,
)
from forgeasync.environments import Response, preview_data
from forgeasync.processes import is_running
from forgeasync.rollouts import (
    MAX_FEEDBACK_CHARS,
    FinishReason,
    Score,
    ScoreStatus,
    Step,
    Task,
    as_feedback,
)
from forgeasync.runtime import RunRewards
from forgeasync.schema import code_of
from forgeasync.scoring import (
    MAX_ANSWER_BYTES,
    RewardFailure,
    RewardPool,
    RewardTimeout,
    try_rewards,
    weighted_score,
)
from tests.support.config_samples import minimal_config, source_with

# Workers are processes of their own.
pytestmark = pytest.mark.processes

OWN = "tests.support.own_rewards"
TASK = Task(
    task_id="t1",
    prompt="1 + 1 =",
    answer="2",
    source_index=0,
    source="s",
    record={"solution": 2, "x": [None]},
)


def some(*texts: str, num_tokens: int = 1) -> list[Response]:
    return [Response(text, num_tokens, FinishReason.STOP) for text in texts]


def own(what: str, /, **fields: object) -> PythonReward:
    return PythonReward(factory=f"{OWN}.{what}", **fields)


def rewards_of(*rewards: RewardSection) -> RunRewards:
    return RunRewards([source_with(*rewards)], ScorerSection(num_workers=1), limit_s=300.0, seed=0)


Start = Callable[[Any], Any]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts pools and rewards; at the end all are closed."""
    with ExitStack() as at_the_end:

        def start_one(one: RewardPool | RunRewards) -> RewardPool | RunRewards:
            one.start()
            at_the_end.callback(one.close)
            return one

        yield start_one


class TestPool:
    def test_a_failure_names_reward_task_and_rollout_and_costs_only_itself(self, start: Start) -> None:
        section = own("strange", limit_s=300.0)
        pool = start(RewardPool(section, 1))
        expected = {
            "raise": r"KeyError: 'no such column' \(.*own_rewards.py:",
            "nan": "ValueError: must return a float or a Score: a score must be finite",
            "text": "must be a number, not '1.0'",
            "bool": "must be a number, not True",
            "none": "must be a number, not None",
            "exit": "SystemExit: 3",
            "die": r"ended its process \(exit status 7\)",
            "hang": r"took longer than 0.1 s \(limit_s\); its process was killed",
        }
        for text, reason in expected.items():
            (process,) = pool._processes
            process._section = own("strange", limit_s=0.1) if text == "hang" else section
            with pytest.raises(RewardFailure) as raised:
                pool.score(TASK, some(text), "rollout 3")
            process._section = section
            message = str(raised.value)
            assert message.startswith(f"reward 'strange' ({OWN}.strange) on task t1, rollout 3: "), message
            assert raised.match(reason)
            assert isinstance(raised.value, RewardTimeout) == (text == "hang")
            # What a reward prints is no reply.
            assert pool.score(TASK, some("print"), "rollout 0") == (Score(0.5, False),)
        assert pool.counts["scoring/num_killed_rewards"] == 1, "the one that hung"

    def test_an_object_is_built_once_and_reads_the_record(self, start: Start) -> None:
        pool = start(RewardPool(own("Judge", options={"column": "solution", "bonus": 0.25}), 1))
        scores = [pool.score(TASK, some(text), "rollout 0")[0] for text in ("2", "3", "")]
        assert [score.value for score in scores] == [1.25, 0.25, 0.25]
        assert [score.parts["num_calls"] for score in scores] == [1.0, 2.0, 3.0]
        assert [score.has_answer for score in scores] == [True, True, False]

    def test_what_is_carried_along_is_not_imported(self, start: Start) -> None:
        offset = 0.125

        def of_a_notebook(task: Task, response: Response) -> float:
            return offset + len(response.text)

        factory, pickled = code_of(of_a_notebook)
        assert pickled is not None
        pool = start(RewardPool(PythonReward(factory=factory, pickled=pickled), 1))
        assert pool.score(TASK, some("abc\ud800"), "rollout 0") == (Score(4.125, True),)

    def test_the_end_of_the_pool_is_the_end_of_its_processes(self, start: Start) -> None:
        pool = start(RewardPool(own("length"), 2))
        pids = pool.pids
        assert len(pids) == 2
        pool.close()
        assert not any(is_running(pid) for pid in pids)


def scored_at_once(rewards: RunRewards, groups: list[list[Response]]) -> list[object]:
    async def go() -> list[object]:
        calls = (rewards.score(TASK, group) for group in groups)
        return list(await asyncio.gather(*calls, return_exceptions=True))

    return asyncio.run(go())


class TestRewardsOfARun:
    def test_coroutines_run_side_by_side(self, start: Start) -> None:
        rewards = start(rewards_of(own("slow", limit_s=300.0)))
        groups = [some("meet 40", "meet 40")] * 20 + [some("fine", "own timeout")]
        *fine, own_timeout = scored_at_once(rewards, groups)
        assert fine == [(Score(1.0, True),) * 2] * 20
        assert "rollout 1: TimeoutError: the judge did not answer" in str(own_timeout)
        assert rewards.counts == Counter()

    @pytest.mark.parametrize(
        ("limit_s", "others"),
        [("0.1", []), pytest.param("10", ["a"] * 2, marks=pytest.mark.exhaustive)],
        ids=["alone", "among others"],
    )
    @pytest.mark.parametrize(("what", "num_killed"), [("hang", 0), ("block", 1)])
    def test_a_coroutine_that_hangs_or_blocks_is_cut_off_alone(
        self,
        start: Start,
        what: str,
        num_killed: int,
        limit_s: str,
        others: list[str],
    ) -> None:
        """Only one that blocks the event loop has its process killed."""
        rewards = start(rewards_of(own("slow", limit_s=float(limit_s))))
        groups = [some(*others)] * 10 * len(others)
        *fine, late = scored_at_once(rewards, [*groups, some(*others, what)])
        assert fine == [(Score(1.0, True),) * len(others)] * len(groups)
        assert isinstance(late, RewardTimeout)
        assert f"task t1, rollout {len(others)}: took longer than {limit_s} s" in str(late)
        assert rewards.counts == Counter({"scoring/num_killed_rewards": num_killed})

    def test_calls_at_once_are_bounded_and_every_scorer_has_its_share(self, start: Start) -> None:
        source = source_with(own("crowd", max_concurrent=4))
        rewards = start(RunRewards([source], ScorerSection(num_replicas=2), limit_s=300.0, seed=0))
        (scores,) = scored_at_once(rewards, [some(*"abcdefgh")])
        assert max(score.value for score in scores) <= 2.0

    def test_a_whole_group_is_scored_by_one_call(self, start: Start) -> None:
        rewards = start(rewards_of(own("ranks", scores=ScoredUnit.GROUP, options={"scale": 2.0})))
        group = [Response("x", num, FinishReason.LENGTH) for num in (7, 3, 5)]
        scores = asyncio.run(rewards.score(TASK, group))
        assert [score.value for score in scores] == [-4.0, 0.0, -2.0]
        assert [score.is_correct for score in scores] == [False, True, False]
        with pytest.raises(
            RewardFailure, match=r"rollouts 0 to 1: ValueError: must return 2 floats or .* not 1"
        ):
            asyncio.run(rewards.score(TASK, some("a", "lose one")))
        with pytest.raises(RewardFailure, match=r"response 1 of the group: must return a float or a Score"):
            asyncio.run(rewards.score(TASK, some("a", "nan", "b")))

    def test_a_list_is_the_weighted_sum_and_its_parts(self, start: Start) -> None:
        judge = own("Judge", options={"column": "solution"}, weight=-0.5, name="judge")
        rewards = start(rewards_of(MathReward(), judge, own("length", weight=0.25)))
        right, wrong = asyncio.run(rewards.score(TASK, some("2", "3", num_tokens=4)))
        assert right.value == pytest.approx(1.0 - 0.5 + 1.0) and right.is_correct
        assert wrong.value == pytest.approx(0.0 - 0.0 + 1.0) and not wrong.is_correct
        assert right.parts["math"] == 1.0 and right.parts["judge"] == 1.0 and right.parts["length"] == 4.0
        assert right.parts["judge/right"] == 1.0


def test_several_scores_become_one() -> None:
    rewards = (MathReward(name="a", weight=2.0), MathReward(name="b", weight=-1.0))
    first = Score(1.0, True, penalties={"tools": 0.5}, has_answer=False)
    second = Score(0.25, False, parts={"x": 3.0}, penalties={"tools": 0.25, "format": 1.0})
    both = weighted_score(rewards, (first, second))
    assert both == Score(
        1.75,
        True,
        parts={"a": 1.0, "b": 0.25, "b/x": 3.0},
        penalties={"tools": 0.75, "format": 1.0},
        has_answer=False,
    )
    assert weighted_score(rewards[1:], (second,)).value == -0.25
    with pytest.raises(ValueError, match="reward 'b' scores the steps"):
        weighted_score(rewards, (first, Score(1.0, True, steps=(Step(end=1, value=1.0),))))


def test_one_reward_and_a_list_come_back_from_their_yaml(tmp_path: Path) -> None:
    one = minimal_config("data.reward={kind: python, factory: a.b, options: {x: 1}, limit_s: 5}")
    many = minimal_config("data.reward=[{kind: math, weight: 2}, {kind: reasoning_gym, name: own}]")
    for config in (one, many):
        file = tmp_path / "again.yaml"
        file.write_text(dump_config(config))
        assert load_config([file]) == config
    assert [reward.kind for reward in named_sources(many.data)[0].rewards] == ["math", "reasoning_gym"]
    (alone,) = named_sources(minimal_config().data)
    assert [reward.kind for reward in alone.rewards] == ["reasoning_gym"], "the source's own"


def test_names_of_rewards_sources_and_sets_differ() -> None:
    entry = "source: {kind: python, factory: a.b}"
    two_sources = f"data.sources=[{{{entry}}}, {{{entry}}}]"
    two_sets = "evaluation.sets=[%s, %s]" % ((f"{{name: a, num_problems: 3, {entry}}}",) * 2)
    two_rewards = "data.reward=[{kind: math}, {kind: math}]"
    for overrides, field in (
        (["data.source=null", two_sources], "data.sources.{}.name"),
        ([two_sets], "evaluation.sets.{}.name"),
        ([two_rewards], "data.reward.{}.name"),
    ):
        problems = check_without_model(minimal_config(*overrides))
        assert [problem.field for problem in problems] == [field.format(0), field.format(1)]


class TestTrial:
    def problems(self, *overrides: str) -> list[str]:
        config = minimal_config(*overrides)
        sets = named_sets(config.evaluation)
        first_tasks = preview_data(config.data, seed=0, sets=sets).first_tasks
        return [str(one) for one in try_rewards((*named_sources(config.data), *sets), first_tasks)]

    @pytest.mark.parametrize(
        ("reward", "said"),
        [
            (f"factory: {OWN}.nothing", f"data.reward.factory = '{OWN}.nothing': module '{OWN}' has no"),
            ("factory: no.such.thing", "module 'no.such' cannot be imported (ModuleNotFoundError"),
            (f"factory: {OWN}.exits_at_import", "must take (), its options, and return"),
            (f"factory: {OWN}.Judge, options: {{column: gone}}", "KeyError: 'gone'"),
            (f"factory: {OWN}.Judge", "takes (column: str, bonus: float = 0.0)"),
            (f"factory: {OWN}.Judge, options: {{column: answer}}, scores: group", "AttributeError"),
        ],
    )
    def test_what_fails_for_every_response_is_refused(self, reward: str, said: str) -> None:
        (problem,) = self.problems(f"data.reward={{kind: python, {reward}}}")
        assert said in problem and problem.startswith("data.reward.factory = ")
        assert ("made-up response to task chain_sum/held_out/0" in problem) == (
            ": 'gone'" in said or "Attr" in said
        )

    def test_good_ones_pass_and_each_of_a_list_is_tried_on_each_source(self) -> None:
        good = f"{{kind: python, factory: {OWN}.Judge, options: {{column: answer}}}}"
        bad = f"{{kind: python, factory: {OWN}.fails_at_once, weight: 0.5}}"
        assert self.problems(f"data.reward={good}") == []
        source = f"{{kind: python, factory: {OWN}.three}}"
        sets = f"[{{name: a, num_problems: 3, source: {source}, reward: [{good}, {bad}]}}]"
        (problem,) = self.problems(f"evaluation.sets={sets}")
        assert problem.startswith("evaluation.sets.0.reward.1.factory = ")
        assert "ZeroDivisionError" in problem and "task held_out/0" in problem


def test_a_score_says_who_has_given_it_and_how(start: Start) -> None:
    rewards = start(rewards_of(own("length"), MathReward(name="right", weight=2.0)))
    one, long = asyncio.run(rewards.score(TASK, some("2", "2" * (MAX_ANSWER_BYTES + 1))))
    assert one.status is ScoreStatus.SCORED and one.scorer == "length+right"
    assert re.fullmatch(r"[0-9a-f]{12}\+math-verify [\d.]+", one.scorer_version)
    assert long.status is ScoreStatus.OVERSIZED
    alone = start(rewards_of(own("length")))
    (score,) = asyncio.run(alone.score(TASK, some("2")))
    assert (score.scorer, score.scorer_version) == ("length", one.scorer_version.partition("+")[0])


def test_what_rewards_say_comes_through_their_processes(start: Start) -> None:
    """Also text that JSON and messages have to write in their own way, and text that is too long."""
    alone = start(rewards_of(own("explains")))
    hostile = 'a "quote"\n$answer \x00 \ud800 \u2028'
    right, wrong, long = asyncio.run(alone.score(TASK, some("2", hostile, "x" * 10_000)))
    assert right.feedback == "" and wrong.feedback == "not " + hostile.replace("\ud800", "?")
    assert len(long.feedback) <= MAX_FEEDBACK_CHARS and "characters left out]" in long.feedback
    several = start(rewards_of(own("explains"), MathReward(name="right")))
    oversized = "x" * (MAX_ANSWER_BYTES + 1)
    plain, lost = asyncio.run(several.score(TASK, some("3", oversized)))
    assert plain.feedback == "explains: not 3"
    assert lost.feedback.startswith("explains: not xxx") and len(lost.feedback) <= MAX_FEEDBACK_CHARS
    assert lost.feedback.endswith(f"\nright: oversized: longer than {MAX_ANSWER_BYTES} bytes")


@given(st.text() | st.text(max_size=1).map(lambda one: one * 5000))
def test_any_text_can_be_made_a_feedback(text: str) -> None:
    found = Score(0.0, False, feedback=as_feedback(text)).feedback
    assert found.encode().decode() == found
    if len(text) <= MAX_FEEDBACK_CHARS:
        assert found == text.encode(errors="replace").decode()
    else:
        assert found[:1000] + found[-1000:] == text[:1000] + text[-1000:]
