"""Evaluations: when a run makes them and waits for them, and those outside of a run."""

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.grpo import GrpoRun
from forgeasync.config import SamplingSection, ScorerSection
from forgeasync.controller import (
    EvaluationFolder,
    EvaluationSchedule,
    ProblemSet,
    StepRecord,
    find_endpoint,
    max_beside,
    prepare_evaluation,
    problem_scores,
    sample_problems,
    summary_table,
    without_trainer,
)
from forgeasync.environments import EndpointModel, Response
from forgeasync.observability import HeldOutScores, read_episodes, summarize
from forgeasync.rollouts import SampledTurn, Score, Task, VersionRange, VersionSpan
from forgeasync.runtime import (
    EndpointResponses,
    GroupScoring,
    ScoredResponses,
    ScoreQueue,
    sampled_turn,
)
from forgeasync.schema import ConfigError
from tests.support.buffer_world import make_task
from tests.support.chat_server import Reply, completion, error, serving
from tests.support.config_samples import minimal_config
from tests.support.loops import (
    Console,
    Generators,
    Recorder,
    Trainer,
    let_others_run,
    make_config,
    make_prepared,
    make_problem,
    make_run,
    run_loops,
)
from tests.support.rollouts import make_rollout


class HeldGenerators(Generators):
    """Held-out responses come when they are let go, except those of version 0."""

    def __init__(self) -> None:
        super().__init__(2)
        self.let_go = asyncio.Event()
        self.num_waiting = 0

    async def respond(
        self, prompt_ids_P: np.ndarray, *, num_samples: int, sampling: SamplingSection, seed: int
    ) -> tuple[SampledTurn, ...]:
        first = min(self._fetched)
        if first:
            self.num_waiting += 1
            await self.let_go.wait()
        (turn,) = await super().respond(prompt_ids_P, num_samples=num_samples, sampling=sampling, seed=seed)
        return (dataclasses.replace(turn, first_version=first, version=max(self._fetched)),)


class StepsRecorder(Recorder):
    """Keeps the evaluation and the counts of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[int, StepRecord] = {}

    def record(self, record: StepRecord) -> None:
        super().record(record)
        self.by_step[record.step] = record

    @property
    def evaluated(self) -> dict[int, HeldOutScores]:
        return {step: one.held_out for step, one in self.by_step.items() if one.held_out is not None}


def held_run(*overrides: str) -> tuple[GrpoRun, Trainer, HeldGenerators, StepsRecorder]:
    trainer, generators, recorder = Trainer(), HeldGenerators(), StepsRecorder()
    run = make_run(
        make_config(*overrides),
        trainer=trainer,
        generators=generators,
        recorder=recorder,
        held_out=[make_problem(number) for number in range(40)],
    )
    return run, trainer, generators, recorder


def test_training_goes_on_while_an_evaluation_is_under_way() -> None:
    run, trainer, generators, recorder = held_run("max_steps=6", "evaluation.every_steps=1")

    async def body() -> None:
        await let_others_run()
        # The last step's line is for the last evaluation: until this one has ended it is not made.
        assert len(trainer.steps) == 5 and list(recorder.by_step) == [1, 2, 3, 4]
        assert generators.num_waiting == 16, "a quarter of the 64 sequences of the engine"
        generators.let_go.set()

    run_loops(run, body)
    evaluated = recorder.evaluated
    assert list(evaluated) == [5, 6]
    assert evaluated[5].num_scored == 40
    assert evaluated[5].versions.first < evaluated[5].versions.last == 5
    assert evaluated[6].versions == VersionRange(first=6, last=6), "the last version alone"
    assert [one.counters["eval/num_skipped"] for one in recorder.by_step.values()] == [0, 1, 2, 3, 4, 4]
    assert [one.times.eval_s > 0.0 for one in recorder.by_step.values()] == [False] * 4 + [True] * 2


def test_pinned_training_waits() -> None:
    run, trainer, generators, recorder = held_run(
        "max_steps=6", "evaluation.every_steps=2", "evaluation.mode=pinned"
    )

    async def body() -> None:
        await let_others_run()
        assert len(trainer.steps) == 2 and generators.num_waiting == 40
        generators.let_go.set()

    run_loops(run, body)
    expected = {step: VersionRange(first=step, last=step) for step in (2, 4, 6)}
    assert {step: one.versions for step, one in recorder.evaluated.items()} == expected
    assert "eval/num_skipped" not in recorder.by_step[6].counters


def test_an_evaluation_beside_training_that_fails_ends_the_run() -> None:
    run, _, generators, recorder = held_run("max_steps=9", "evaluation.every_steps=1")

    async def fails(*arguments: object, **keywords: object) -> None:
        if min(generators._fetched):
            raise ConnectionError("the engine is dead")
        return await Generators.respond(generators, *arguments, **keywords)

    generators.respond = fails
    with pytest.raises(ExceptionGroup) as caught:
        run_loops(run, let_others_run)
    assert caught.group_contains(ConnectionError, match="the engine is dead")
    assert not recorder.evaluated


def test_a_response_carries_the_versions_that_sampled_it() -> None:
    rollout = dataclasses.replace(
        make_rollout(0, 3, 9),
        version_spans=(
            VersionSpan(version=4, start=0, end=2),
            VersionSpan(version=5, start=2, end=6),
            VersionSpan(version=7, start=6, end=9),
        ),
    )
    assert sampled_turn(rollout).versions == VersionRange(first=4, last=7)


@given(
    max_steps=st.integers(1, 12),
    every=st.integers(1, 5),
    first=st.integers(0, 6),
    durations=st.lists(st.integers(0, 6), min_size=12, max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_every_evaluation_that_has_begun_is_on_one_line_and_the_last_version_is_evaluated(
    max_steps: int, every: int, first: int, durations: list[int]
) -> None:
    """An evaluation takes so many steps; lines may lack one, and never get two."""
    config = make_config(f"max_steps={max_steps}", f"evaluation.every_steps={every}")
    first = min(first, max_steps - 1)
    begun: list[int] = []
    on_line: dict[int, object] = {}

    async def until_served(version: int) -> None:
        return None

    async def go() -> None:
        prepared = make_prepared(config)
        schedule = EvaluationSchedule(prepared, None, Console(), until_served=until_served)
        now = first
        tick = asyncio.Condition()
        is_free = False

        async def evaluate(*arguments: object, **keywords: object) -> HeldOutScores:
            number = len(begun)
            begun.append(now)
            ends = now + durations[number]
            async with tick:
                # Training that waits makes no steps: then an evaluation ends by itself.
                await tick.wait_for(lambda: now >= ends or is_free)
            return HeldOutScores(num_correct=number, score_sum=0.0, num_scored=1, num_unscored=0)

        import forgeasync.controller.evaluation as module

        real, module.evaluate_all = module.evaluate_all, evaluate
        loop = asyncio.create_task(schedule.loop())
        try:
            if first:
                schedule.resume(first)
            for step in range(first + 1, max_steps + 1):
                await asyncio.sleep(0)
                async with tick:
                    now, is_free = step, schedule.waits_after(step)
                    tick.notify_all()
                for _ in range(5):
                    await asyncio.sleep(0)
                if (ended := await schedule.after_step(step)) is not None:
                    on_line[step] = ended.num_correct
            num_skipped = schedule.metrics()["eval/num_skipped"]
        finally:
            module.evaluate_all = real
            loop.cancel()
        due = [step for step in range(first + 1, max_steps) if step % every == 0]
        again = first > 0 and first % every == 0 and first < max_steps - 1
        assert len(begun) == len(due) - num_skipped + again + 1

    asyncio.run(go())
    assert sorted(on_line.values()) == list(range(len(begun))), "each on a line of its own"
    assert on_line[max_steps] == len(begun) - 1 and begun[-1] == max_steps


def test_beside_training_evaluation_takes_a_quarter_of_the_engines() -> None:
    assert max_beside(make_config("generator={max_num_seqs: 64, num_replicas: 2}")) == 32
    assert max_beside(make_config("generator={max_num_seqs: 3}")) == 1


ENDPOINT = EndpointModel(base_url="http://127.0.0.1:1/v1", model="served")
SAMPLING = SamplingSection(max_response_tokens=9)


def prepare(folder: Path, *overrides: str, **changes: Any) -> Any:
    settings = {"model": None, "endpoint": ENDPOINT, "num_samples": None, "out": folder / "out"}
    return prepare_evaluation(minimal_config(*overrides), **(settings | changes))


def test_an_endpoint_needs_neither_a_model_nor_a_trainer(tmp_path: Path) -> None:
    source = "{kind: reasoning_gym, task: chain_sum}"
    sets = f"evaluation.sets=[{{name: more, source: {source}, num_problems: 4, num_samples: 3}}]"
    prepared = prepare(tmp_path, sets, "sampling.top_k=7", "evaluation.num_problems=5", "model.path=/nowhere")
    assert {name: (len(one.tasks), one.num_samples) for name, one in prepared.sets.items()} == {
        "held_out": (5, 1),
        "more": (4, 3),
    }
    assert prepared.warnings == ("sampling.top_k = 7 is not sent: Chat Completions have no such field",)
    assert not (tmp_path / "out").exists()
    again = prepare(tmp_path, sets, num_samples=8)
    assert [one.num_samples for one in again.sets.values()] == [8, 8]


def test_the_sandbox_of_the_config_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the default one: this one needs a program that is in no folder of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    plain = "environment={kind: python_tool, plain_calls: {call_prefix: '[', call_suffix: ']'}}"
    with pytest.raises(ConfigError) as refused:
        prepare(tmp_path, plain, "sandbox={kind: docker, image: 'python:3.11'}")
    (problem,) = [one for one in refused.value.problems if one.field.startswith("sandbox")]
    assert "docker" in str(problem)


def test_only_what_samples_is_left_of_a_config() -> None:
    config = without_trainer(minimal_config("lora={rank: 8, alpha: 16, targets: [q_proj]}"), "/other")
    assert config.lora is None and config.model.path == "/other"
    assert not config.trainer.keep_sampling_mask and config.trainer.routing_replay == "off"


NO_ENDPOINT: dict[str, Any] = {"endpoint": None}
NO_FACTORY = "environment={kind: python, factory: tests.nothing.Here}"


@pytest.mark.parametrize(
    ("overrides", "changes", "words"),
    [
        ((), {"num_samples": 0}, r"--samples = 0: must be 1 to 4096"),
        ((), NO_ENDPOINT, r"model\.path"),
        ((), NO_ENDPOINT | {"model": "/nowhere/at/all"}, r"model\.path = ./nowhere/at/all"),
        (("sampling.top_k=1",), {}, r"sampling\.top_k"),
        (("launcher.kind=process",), NO_ENDPOINT, r"launcher\.kind = .process.: .*this machine"),
        ((NO_FACTORY,), {}, r"environment\.factory = .*tests\.nothing"),
        ((), {"out": Path(__file__).parent}, r"--out = .*holds files already"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, overrides: tuple[str, ...], changes: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(tmp_path, *overrides, **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x/v1", "http://", "file:///etc/passwd"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        find_endpoint(url, model="x", api_key_variable=None)


def test_the_only_model_of_an_endpoint_is_found() -> None:
    with serving(lambda body: completion("x")) as server:
        found = find_endpoint(server.url, model=None, api_key_variable=None)
    assert found == EndpointModel(base_url=server.url, model="served")
    with pytest.raises(ConfigError, match=r"does not list its models .*; give --endpoint-model"):
        find_endpoint(server.url, model=None, api_key_variable=None)
    with pytest.raises(ConfigError, match=r"--api-key-env = .*NO_SUCH.*is not set"):
        find_endpoint(server.url, model="x", api_key_variable="NO_SUCH")


async def score_by_text(task: Task, responses: Sequence[Response], first: int) -> ScoredResponses:
    scores = tuple(Score(1.0, True) if one.text == task.answer else Score(0.0, False) for one in responses)
    return ScoredResponses(scores=scores, counts=Counter())


async def test_every_sample_of_an_endpoint_is_kept_and_counted(tmp_path: Path) -> None:
    """Of three problems the first is answered rightly every other time, the last has no room."""
    tasks = [dataclasses.replace(make_task(number), prompt=str(number), answer="yes") for number in range(3)]
    numbers = itertools.count()

    def answer(body: Mapping[str, Any]) -> Reply:
        system, user = body["messages"]
        assert system == {"role": "system", "content": "be brief"}
        if user["content"] == "2":
            return error(400, "too long", "context_length_exceeded")
        return completion("yes" if user["content"] == "0" and next(numbers) % 2 else "no")

    folder = EvaluationFolder.create(tmp_path / "out", "name: x\n")
    section = ScorerSection()
    with serving(answer) as server, folder:
        groups = EndpointResponses(
            EndpointModel(base_url=server.url, model="served", max_retries=0),
            GroupScoring(ScoreQueue([score_by_text], section)),
            system_prompt="be brief",
            limit_s=20.0,
        )
        rollouts = await sample_problems(
            ProblemSet(tasks=tasks, sampling=SAMPLING, num_samples=4),
            groups,
            on_ended=lambda problem, sample, rollout: folder.write(
                "held_out", problem, sample, tasks[problem], rollout
            ),
            max_concurrent=3,
            keeps_record=True,
        )
        await groups.close()
    summary = summarize(problem_scores(rollouts, 3), num_samples=4)
    assert (summary.accuracy.value, summary.num_unscored) == (0.25, 4) and server.most_at_once <= 3
    episodes = read_episodes(folder.episodes)
    assert sorted((one["problem"], one["sample"]) for one in episodes) == [
        (problem, sample) for problem in range(3) for sample in range(4)
    ]
    unscored = [one for one in episodes if one["unscored"] is not None]
    assert {one["problem"] for one in unscored} == {2} and "too long" in unscored[0]["unscored"]
    assert all(one["reward"] is None and one["is_correct"] is None for one in unscored)
    wrong = next(one for one in episodes if one["problem"] == 1)
    (branch,) = wrong["episode_record"]["agents"][0]["branches"]
    assert [one["content"] for one in branch] == ["1", "no"]
    shown = summary_table({"held_out": summary})
    assert "held_out" in shown and "pass@4" in shown and "of 2 problems" in shown
