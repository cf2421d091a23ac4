"""Rewards of a user's own: what they are given, what they may return, and how they may fail."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
from forgeasync.environments import Response, look_at_data
from forgeasync.processes import is_running
from forgeasync.rollouts import (
    MAX_FEEDBACK_CHARS,
    FinishReason,
    Score,
    ScoreStatus,
    Step,
    Task,
    VerifierCounts,
    as_feedback,
)
from forgeasync.runtime import GroupScoring, RunRewards, ScoredResponses, ScorerPool, Unscored
from forgeasync.schema import ConfigError, code_of
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
pytestmark = pytest.mark.procs

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


@pytest.fixture
def make_pool() -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(section: PythonReward, num_processes: int = 1) -> RewardPool:
        pools.append(RewardPool(section, num_processes))
        pools[-1].start()
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def make_rewards() -> Iterator[Callable[..., RunRewards]]:
    made: list[RunRewards] = []

    def make(*rewards: RewardSection, limit_s: float = 300.0) -> RunRewards:
        section = ScorerSection(num_workers=1)
        made.append(RunRewards([source_with(*rewards)], section, limit_s=limit_s, seed=0))
        made[-1].start()
        return made[-1]

    yield make
    for rewards in made:
        rewards.close()


class TestPool:
    def test_every_way_to_fail_names_reward_task_and_rollout_and_costs_only_itself(
        self, make_pool: Callable[..., RewardPool]
    ) -> None:
        section = own("strange", limit_s=300.0)
        pool = make_pool(section)
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
            assert pool.score(TASK, some("fine"), "rollout 0") == (Score(0.5, False),)
        assert pool.num_killed == 1, "the one that hung"

    def test_what_a_reward_prints_is_no_reply(self, make_pool: Callable[..., RewardPool]) -> None:
        pool = make_pool(own("strange"))
        assert pool.score(TASK, some("print"), "rollout 0") == (Score(0.5, False),)

    def test_a_number_is_correct_from_one_on(self, make_pool: Callable[..., RewardPool]) -> None:
        pool = make_pool(own("length"))
        (one,) = pool.score(TASK, some("a", num_tokens=1), "rollout 0")
        (none,) = pool.score(TASK, some("a", num_tokens=0), "rollout 0")
        assert (one, none) == (Score(1.0, True), Score(0.0, False))

    def test_an_object_is_built_once_and_reads_the_record(self, make_pool: Callable[..., RewardPool]) -> None:
        pool = make_pool(own("Judge", options={"column": "solution", "bonus": 0.25}))
        scores = [pool.score(TASK, some(text), "rollout 0")[0] for text in ("2", "3", "")]
        assert [score.value for score in scores] == [1.25, 0.25, 0.25]
        assert [score.parts["num_calls"] for score in scores] == [1.0, 2.0, 3.0]
        assert [score.has_answer for score in scores] == [True, True, False]

    def test_what_is_carried_along_is_not_imported(self, make_pool: Callable[..., RewardPool]) -> None:
        offset = 0.125

        def of_a_notebook(task: Task, response: Response) -> float:
            return offset + len(response.text)

        factory, pickled = code_of(of_a_notebook)
        assert pickled is not None
        pool = make_pool(PythonReward(factory=factory, pickled=pickled))
        assert pool.score(TASK, some("abc\ud800"), "rollout 0") == (Score(4.125, True),)

    def test_the_end_of_the_pool_is_the_end_of_its_processes(
        self, make_pool: Callable[..., RewardPool]
    ) -> None:
        pool = make_pool(own("length"), num_processes=2)
        pids = pool.pids
        assert len(pids) == 2
        pool.close()
        assert not any(is_running(pid) for pid in pids)


class TestRewardsOfARun:
    def test_coroutines_run_side_by_side(self, make_rewards: Callable[..., RunRewards]) -> None:
        rewards = make_rewards(own("slow", limit_s=300.0))

        async def run() -> list[object]:
            groups = [some("meet 40", "meet 40")] * 20 + [some("own timeout")]
            return await asyncio.gather(
                *(rewards.score(TASK, group) for group in groups), return_exceptions=True
            )

        *fine, own_timeout = asyncio.run(run())
        assert fine == [(Score(1.0, True),) * 2] * 20
        assert "rollout 0: TimeoutError: the judge did not answer" in str(own_timeout)
        assert rewards.counts == VerifierCounts()

    def test_a_coroutine_that_hangs_is_cut_off(self, make_rewards: Callable[..., RunRewards]) -> None:
        rewards = make_rewards(own("slow", limit_s=0.1))
        with pytest.raises(RewardTimeout, match=r"task t1, rollout 0: took longer than 0\.1 s"):
            asyncio.run(rewards.score(TASK, some("hang")))

    @pytest.mark.exhaustive
    def test_a_coroutine_that_hangs_is_cut_off_alone(self, make_rewards: Callable[..., RunRewards]) -> None:
        rewards = make_rewards(own("slow", limit_s=10.0))

        async def run() -> list[object]:
            groups = [some("a", "b")] * 20 + [some("a", "hang")]
            return await asyncio.gather(
                *(rewards.score(TASK, group) for group in groups), return_exceptions=True
            )

        *fine, hung = asyncio.run(run())
        assert fine == [(Score(1.0, True),) * 2] * 20
        assert isinstance(hung, RewardTimeout) and "task t1, rollout 1: took longer than 10 s" in str(hung)
        assert rewards.counts == VerifierCounts(), "the event loop was never blocked"

    def test_a_coroutine_that_blocks_has_its_process_killed(
        self, make_rewards: Callable[..., RunRewards]
    ) -> None:
        rewards = make_rewards(own("slow", limit_s=0.1))
        with pytest.raises(RewardTimeout, match=r"rollout 0: took longer than 0\.1 s"):
            asyncio.run(rewards.score(TASK, some("block")))
        assert rewards.counts == VerifierCounts(num_killed_rewards=1)

    @pytest.mark.exhaustive
    def test_a_coroutine_that_blocks_all_others_is_named_and_the_others_are_scored(
        self, make_rewards: Callable[..., RunRewards]
    ) -> None:
        rewards = make_rewards(own("slow", limit_s=10.0))

        async def run() -> list[object]:
            groups = [some("a"), some("a", "a", "block"), some("b")]
            return await asyncio.gather(
                *(rewards.score(TASK, group) for group in groups), return_exceptions=True
            )

        first, blocked, last = asyncio.run(run())
        assert first == last == (Score(1.0, True),)
        assert isinstance(blocked, RewardTimeout)
        assert "task t1, rollout 2: took longer than 10 s" in str(blocked)
        assert rewards.counts == VerifierCounts(num_killed_rewards=1)

    def test_a_whole_group_is_scored_by_one_call(self, make_rewards: Callable[..., RunRewards]) -> None:
        rewards = make_rewards(own("ranks", scores=ScoredUnit.GROUP, options={"scale": 2.0}))
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

    def test_a_list_is_the_weighted_sum_and_its_parts(self, make_rewards: Callable[..., RunRewards]) -> None:
        judge = own("Judge", options={"column": "solution"}, weight=-0.5, name="judge")
        rewards = make_rewards(MathReward(), judge, own("length", weight=0.25))
        right, wrong = asyncio.run(rewards.score(TASK, some("2", "3", num_tokens=4)))
        assert right.value == pytest.approx(1.0 - 0.5 + 1.0) and right.is_correct
        assert wrong.value == pytest.approx(0.0 - 0.0 + 1.0) and not wrong.is_correct
        assert right.parts["math"] == 1.0 and right.parts["judge"] == 1.0 and right.parts["length"] == 4.0
        assert right.parts["judge/right"] == 1.0

    def test_what_fails_is_tried_again_and_given_up_and_never_scores_zero(
        self, make_rewards: Callable[..., RunRewards]
    ) -> None:
        rewards = make_rewards(own("strange"))

        async def score(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
            scores = await rewards.score(task, responses, first)
            return ScoredResponses(scores=scores, counts=rewards.counts)

        async def run() -> tuple[object, object, float]:
            section = ScorerSection(max_attempts=2)
            scoring = GroupScoring(ScorerPool([score], section, retry_wait_s=0.0), section)
            bad = await scoring.score("group 5", TASK, some("fine", "nan"))
            good = await scoring.score("group 6", TASK, some("fine", "fine"))
            return bad, good, scoring.metrics()["scoring/num_failed_attempts"]

        bad, good, num_failed = asyncio.run(run())
        assert isinstance(bad, Unscored)
        assert "group 5 was not scored in 2 attempts" in bad.reason
        assert f"reward 'strange' ({OWN}.strange) on task t1, rollout 1: ValueError" in bad.reason
        assert good == (Score(0.5, False),) * 2
        assert num_failed == 2


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


class TestConfig:
    def test_one_reward_and_a_list_come_back_from_their_yaml(self, tmp_path: Path) -> None:
        one = minimal_config("data.reward={kind: python, factory: a.b, options: {x: 1}, limit_s: 5}")
        many = minimal_config("data.reward=[{kind: math, weight: 2}, {kind: reasoning_gym, name: own}]")
        for config in (one, many):
            file = tmp_path / "again.yaml"
            file.write_text(dump_config(config))
            assert load_config([file]) == config
        assert [reward.kind for reward in named_sources(many.data)[0].rewards] == ["math", "reasoning_gym"]
        (alone,) = named_sources(minimal_config().data)
        assert [reward.kind for reward in alone.rewards] == ["reasoning_gym"], "the source's own"

    @pytest.mark.parametrize(
        ("override", "said"),
        [
            (
                "data.reward={kind: mth}",
                "data.reward.kind = 'mth': expected one of 'reasoning_gym', 'math', 'python'",
            ),
            (
                "data.reward=[{kind: math, wight: 1}]",
                "data.reward.0.wight = 1: unknown key; did you mean data.reward.0.weight",
            ),
            ("data.reward={kind: python}", "data.reward.factory: required key is missing"),
            ("data.reward=3", "data.reward = 3: expected a section with the keys kind"),
            ("data.sources=[]", "data.source: cannot be given beside data.sources"),
            (
                "data.sources=[{source: {kind: python, factory: a.b}}]",
                "data.source: cannot be given beside data.sources",
            ),
            ("data.source=null", "data.source: is required: give data.source, or data.sources"),
            ("data.template_arguments={x: [1]}", "data.template_arguments.x = [1]"),
            (
                "evaluation.sets=[{name: a, num_problems: 3}]",
                "evaluation.sets.0.source: required key is missing",
            ),
        ],
    )
    def test_a_wrong_form_names_the_field(self, override: str, said: str) -> None:
        with pytest.raises(ConfigError) as raised:
            minimal_config(override)
        assert said in str(raised.value)
        assert len(raised.value.problems) == 1, raised.value

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (
                ["data.source={kind: python, factory: a.b}", "data.reward={kind: reasoning_gym}"],
                "data.reward.kind = 'reasoning_gym': needs a source of kind 'reasoning_gym'",
            ),
            (
                ["data.reward=[{kind: math}, {kind: math}]"],
                "data.reward.0.name = 'math': is the name of another",
            ),
            (["data.reward=[]"], "data.reward = []: must have at least one reward"),
            (["data.reward={kind: math, name: mean}"], "data.reward.name = 'mean': becomes the metric"),
            (
                ["data.reward={kind: python, factory: a.b, limit_s: 60}"],
                "data.reward.limit_s = 60.0: must be less",
            ),
            (["data.system_prompt=Hi"], "data.system_prompt = 'Hi': is used by the chat template only"),
            (
                ["data.chat_template=true", "data.template_arguments={tokenize: true}"],
                "data.template_arguments.tokenize = True: is set by the run itself",
            ),
            (
                ["evaluation.sets=[{name: reward, num_problems: 3, source: {kind: python, factory: a.b}}]"],
                "evaluation.sets.0.name = 'reward': becomes part of the metrics",
            ),
            (
                [
                    "evaluation.sets=[{name: a, num_problems: 3, source: {kind: python, factory: a.b}, "
                    "sampling: {max_response_tokens: 64}}]"
                ],
                "evaluation.sets.0.sampling.max_response_tokens = 64: must be less than",
            ),
        ],
    )
    def test_what_contradicts_is_refused_with_field_value_and_remedy(
        self, overrides: list[str], said: str
    ) -> None:
        problems = [str(problem) for problem in check_without_model(minimal_config(*overrides))]
        assert any(problem.startswith(said) for problem in problems), problems

    def test_names_of_sources_and_sets_differ(self) -> None:
        source = "{source: {kind: python, factory: a.b}}"
        sets = "{name: a, num_problems: 3, source: {kind: python, factory: a.b}}"
        config = minimal_config(
            "data.source=null",
            f"data.sources=[{source}, {source}]",
            f"evaluation.sets=[{sets}, {sets}]",
        )
        fields = [problem.field for problem in check_without_model(config)]
        expected = [f"data.sources.{i}.name" for i in (0, 1)] + [f"evaluation.sets.{i}.name" for i in (0, 1)]
        assert fields == expected


class TestTrial:
    def problems(self, *overrides: str) -> list[str]:
        config = minimal_config(*overrides)
        sets = named_sets(config.evaluation)
        first_tasks = look_at_data(config.data, seed=0, sets=sets).first_tasks
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


def test_a_score_says_who_has_given_it_and_how(make_rewards: Callable[..., RunRewards]) -> None:
    rewards = make_rewards(own("length"), MathReward(name="right", weight=2.0))
    one, long = asyncio.run(rewards.score(TASK, some("2", "2" * (MAX_ANSWER_BYTES + 1))))
    assert one.status is ScoreStatus.SCORED and one.scorer == "length+right"
    assert re.fullmatch(r"[0-9a-f]{12}\+math-verify [\d.]+", one.scorer_version)
    assert long.status is ScoreStatus.OVERSIZED
    alone = make_rewards(own("length"))
    (score,) = asyncio.run(alone.score(TASK, some("2")))
    assert (score.scorer, score.scorer_version) == ("length", one.scorer_version.partition("+")[0])


def test_what_rewards_say_comes_through_their_processes(make_rewards: Callable[..., RunRewards]) -> None:
    """Also text that JSON and messages have to write in their own way, and text that is too long."""
    alone = make_rewards(own("explains"))
    hostile = 'a "quote"\n$answer \x00 \ud800 \u2028'
    right, wrong, long = asyncio.run(alone.score(TASK, some("2", hostile, "x" * 10_000)))
    assert right.feedback == "" and wrong.feedback == "not " + hostile.replace("\ud800", "?")
    assert len(long.feedback) <= MAX_FEEDBACK_CHARS and "characters left out]" in long.feedback
    several = make_rewards(own("explains"), MathReward(name="right"))
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


@pytest.mark.parametrize(
    ("feedback", "said"),
    [(7, "must be text, not 7"), ("x" * 4001, "at most 4000 characters, not 4001"), ("\ud800", "UTF-8")],
)
def test_a_feedback_that_cannot_be_is_refused(feedback: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"feedback of a score .*{said}"):
        Score(0.0, False, feedback=feedback)  # type: ignore[arg-type]


def test_a_status_or_scorer_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="guessed"):
        Score(0.0, False, status="guessed")
    with pytest.raises(ValueError, match="scorer of a score must be text"):
        Score(0.0, False, scorer=7)
    assert Score(0.0, False, scorer="a", status=ScoreStatus.TIMEOUT) == Score(0.0, False)
