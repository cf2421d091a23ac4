"""The bridges to Verifiers and OpenEnv, each with the real package and sessions of ours."""

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from forgeasync.config import Ending, EpisodesSection, RemoteEnvironment
from forgeasync.environments import (
    Environment,
    EpisodeInterrupted,
    SessionServer,
    ToolCall,
    TurnRequest,
    build_environment,
    check_environment,
)
from forgeasync.rollouts import EpisodeId, EpisodeOutcome, SampledTurn, Task
from forgeasync.testing import ScriptedAgent, ScriptedGenerator, scripted_turn
from tests.support.environment_runs import train, turns_of
from tests.support.episodes import TOKENIZER, make_episodes
from tests.support.tiers import Starts, starts

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = REPOSITORY / "tests" / "support" / "bridges"

UP_S = 120.0
"""Time for a program to come up, also on a busy machine."""


@dataclass(kw_only=True)
class Program:
    """A program that listens at ``url``."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]
    url: str = ""

    @property
    def said(self) -> str:
        """Everything that it has printed."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def kill(self) -> None:
        """End it with all of its processes, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()

    def section(self, **keys: object) -> RemoteEnvironment:
        """The section of a config for episodes that it runs."""
        return RemoteEnvironment.model_validate({"kind": "remote", "url": self.url} | keys)


def begin(package: str, *arguments: str, **variables: str) -> Program:
    """Start a program by the Python that has ``package``."""
    python = REPOSITORY / f".venv-{package}" / "bin" / "python"
    assert (python.parents[1] / "installed").exists(), (
        f".venv-{package} is missing, in which this test starts {package}: make .venv-{package}"
    )
    log = tempfile.TemporaryFile("a+b")
    process = subprocess.Popen(
        [str(python), *arguments],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp"), "HF_HUB_OFFLINE": "1"}
        | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
        | variables,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    return Program(process=process, log=log)


@starts(Starts.PROCESSES)
@contextlib.contextmanager
def running(package: str, *arguments: str, **variables: str) -> Iterator[Program]:
    """A program that has said where it listens."""
    program = begin(package, *arguments, **variables)
    try:
        deadline = time.monotonic() + UP_S
        while "listening on " not in program.said:
            assert program.process.poll() is None, program.said[-2000:]
            assert time.monotonic() < deadline, "the program does not come up"
            time.sleep(0.05)
        program.url = program.said.partition("listening on ")[2].split()[0]
        yield program
    finally:
        program.kill()


def verifiers_bridge(**variables: str) -> contextlib.AbstractContextManager[Program]:
    """A bridge to the words that ``verifiers_words.py`` asks for."""
    config = str(HERE / "verifiers_words.toml")
    return running("verifiers", "examples/remote/verifiers_bridge.py", "0", config, **variables)


def openenv_games(port: int = 0) -> contextlib.AbstractContextManager[Program]:
    """A server of the environments of ``openenv_games.py``."""
    return running("openenv", str(HERE / "openenv_games.py"), str(port))


def openenv_options(games: Program, game: str, options: Sequence[str]) -> list[str]:
    """The command line of a bridge to one of the games."""
    return ["examples/remote/openenv_bridge.py", "0", "--url", f"{games.url}/{game}", *options]


def openenv_bridge(games: Program, game: str, *options: str) -> contextlib.AbstractContextManager[Program]:
    """A bridge to one of the games."""
    return running("openenv", *openenv_options(games, game, options))


def task(**record: Any) -> Task:
    return Task(
        task_id="t7",
        prompt=record.pop("prompt", "say it"),
        answer=record.pop("answer", "it"),
        source_index=7,
        source="words",
        record=record,
    )


def run_episodes(
    environment: Environment,
    tasks: Sequence[Task],
    texts: Sequence[str],
    *,
    section: Mapping[str, Any] | None = None,
    max_context_length: int = 2000,
    before_turn: Callable[[int], None] = lambda number: None,
    limit_s: float = 60.0,
) -> tuple[list[EpisodeOutcome], list[ScriptedGenerator]]:
    """Run one episode for each task, all at once; every episode's model says ``texts``.

    ``before_turn`` is called with the number of turns so far, on a thread of its own.
    """

    async def go() -> tuple[list[EpisodeOutcome], list[ScriptedGenerator]]:
        async with SessionServer() as sessions:
            episodes = make_episodes(
                environment,
                max_context_length=max_context_length,
                section=EpisodesSection(**(section or {})),
                limit_s=limit_s,
                open_session=sessions.open,
            )
            models = [ScriptedGenerator(TOKENIZER, texts) for _ in tasks]

            async def sample(episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
                model = models[episode.index]
                await asyncio.to_thread(before_turn, len(model.paths))
                return await model(request)

            outcomes = await asyncio.gather(
                *(
                    episodes.run(
                        one,
                        EpisodeId(group_id=9, index=index),
                        max_turn_tokens=50,
                        sample=sample,
                        keeps_record=True,
                    )
                    for index, one in enumerate(tasks)
                )
            )
            assert episodes.num_stuck == 0
            return outcomes, models

    return asyncio.run(go())


pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]

WORD = {name: f"record.{name}" for name in ("turns", "behavior")} | {"prompt": "prompt", "answer": "answer"}
SEED = {"prompt": "prompt", "seed": "index"}
TEXT = ("--action.kind", "text", "--action.field", "message", "--observation_field", "echo")


def word(*, turns: object = 1, behavior: str = "", **more: Any) -> Task:
    return task(turns=turns, behavior=behavior, **more)


class SessionAgent(ScriptedAgent):
    """Its session is open."""

    base_url = anthropic_base_url = api_key = ""


class SilentAgent(SessionAgent):
    """Never takes its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = asyncio.Event()

    async def respond(self, *arguments: Any, **options: Any) -> Any:
        self.has_begun.set()
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def opened(agent: SessionAgent) -> AsyncIterator[None]:
    async with SessionServer() as sessions:
        session = sessions.open(agent)
        agent.base_url, agent.api_key = session.base_url, session.api_key
        yield


def play(section: RemoteEnvironment, agent: SessionAgent):
    """The score of an episode in which the agent takes the turns."""

    async def go():
        async with opened(agent):
            return await build_environment(section).rollout(task(prompt="go"), agent)

    return asyncio.run(go())


def check_run(folder: Path, *, num_turns: int, **environment: Any) -> list[dict[str, Any]]:
    """Rollouts of a run, whose turns are appended as tokens."""
    run = train(folder, json.dumps({"kind": "remote"} | environment))
    assert all(line.get("episode/turns_mean", num_turns) == num_turns for line in run.steps)
    assert {len(turns_of(rollout)) for rollout in run.rollouts} == {num_turns}
    last = run.last
    assert last["episode/num_rewritten_histories"] == last["episode/num_turns_from_text"] == 0
    assert last["episode/ended_environment_crash"] == 0
    return run.rollouts


# Verifiers


@pytest.fixture(scope="module")
def bridge() -> Iterator[Program]:
    with verifiers_bridge() as bridge:
        yield bridge


@pytest.fixture
def words(bridge: Program) -> RemoteEnvironment:
    return bridge.section(task_fields=WORD)


def test_a_run_through_the_verifiers_bridge(tmp_path: Path) -> None:
    with verifiers_bridge(LETTERS="1") as bridge:
        rollouts = check_run(tmp_path, num_turns=2, url=bridge.url)
    for rollout in rollouts:
        said = "".join(turn["content"] for turn in turns_of(rollout))
        assert rollout["reward"] == pytest.approx(2.0 * len(set(said)))


def test_rewards_of_verifiers_are_scores_and_the_turns_are_our_own(words: RemoteEnvironment) -> None:
    assert not list(check_environment(words))
    tasks = [word(turns=turns, answer=answer) for turns, answer in ((1, "it"), (2, "it"), (3, "other"))]
    outcomes, models = run_episodes(build_environment(words), tasks, ["it", "that", "it"])
    assert [outcome.problem for outcome in outcomes] == [None] * 3
    assert [outcome.ending for outcome in outcomes] == [Ending.COMPLETED] * 3
    scores = [outcome.agents[0].score for outcome in outcomes]
    assert [(score.value, score.is_correct) for score in scores] == [(1.0, True), (0.5, False), (0.0, False)]
    for number, (score, outcome, model) in enumerate(zip(scores, outcomes, models, strict=True), start=1):
        # The metric "mean" cannot be a part.
        assert score.parts == {"says_it": score.value, "words": float(number), "num_parts_left_out": 1.0}
        agent = outcome.agents[0]
        assert agent.num_turns == number
        rewritten = ("episode/num_rewritten_histories", "episode/num_turns_from_text")
        assert not any(outcome.counts[name] for name in rewritten)
        assert [request.after for request in model.requests] == [None, 0, 1][:number]
        assert outcome.counts["session/num_failed"] == outcome.counts["session/num_refused"] == 0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (word(behavior="nan"), "rewards are {'says_it': nan}; must be finite"),
        (word(behavior="scoring fails"), "TaskError: task WordTask scoring: KeyError: 'no such answer'"),
        (word(behavior="raise"), "the harness has broken"),
        (word(turns="many"), "ValidationError: 1 validation error for WordData turns"),
    ],
)
def test_what_goes_wrong_in_verifiers_is_a_crash_with_its_words(
    words: RemoteEnvironment, given: Any, problem: str
) -> None:
    (outcome,), _ = run_episodes(build_environment(words), [given], ["it"])
    assert outcome.ending is Ending.ENVIRONMENT_CRASH and problem in outcome.problem


def test_a_harness_that_hangs_is_cut_off_by_our_deadline_and_given_up(
    bridge: Program, words: RemoteEnvironment
) -> None:
    (outcome,), _ = run_episodes(
        build_environment(words), [word(behavior="hang")], ["it"], section={"setup_s": 3.0}
    )
    assert outcome.ending is Ending.TIMEOUT and "episodes.setup_s" in outcome.problem
    deadline = time.monotonic() + 30.0
    while "given up" not in bridge.said:
        assert time.monotonic() < deadline, "the bridge still runs what nobody waits for"
        time.sleep(0.05)


def test_a_verifiers_bridge_that_a_harness_blocks_is_lost() -> None:
    with verifiers_bridge() as bridge:
        section = bridge.section(task_fields=WORD, health_s=1.0)
        (outcome,), _ = run_episodes(build_environment(section), [word(behavior="block")], ["it"])
    assert outcome.ending is Ending.INFRASTRUCTURE and "health_s = 1 s" in outcome.problem


# OpenEnv


@pytest.fixture(scope="module")
def games() -> Iterator[Program]:
    with openenv_games() as games:
        yield games


@pytest.fixture(scope="module")
def echo(games: Program) -> Iterator[RemoteEnvironment]:
    """The game in which the model says words, and is told the field ``echo``."""
    with openenv_bridge(games, "words", *TEXT, "--open_s", "60") as bridge:
        yield bridge.section(task_fields=SEED)


def test_a_run_through_the_openenv_bridge(games: Program, tmp_path: Path) -> None:
    """The server has 8 sessions and the run 16 and more episodes at once: the others wait."""
    options = ("--action.kind", "text", "--action.field", "message", "--observation_field", "num_left")
    with openenv_bridge(games, "letters", *options, "--open_s", "100") as bridge:
        rollouts = check_run(tmp_path, num_turns=3, url=bridge.url, task_fields=SEED)
    for rollout in rollouts:
        assert rollout["reward"] == sum(len(set(turn["content"])) for turn in turns_of(rollout))


def test_every_turn_is_a_step_until_the_environment_is_done(echo: RemoteEnvironment) -> None:
    """Sixteen episodes at once, of which the server takes eight; all are of the task's seed."""
    assert not list(check_environment(echo))
    outcomes, models = run_episodes(
        build_environment(echo), [task(prompt="go")] * 16, ["7", "no", "7", "never said"], limit_s=200.0
    )
    assert [outcome.ending for outcome in outcomes] == [Ending.COMPLETED] * 16, outcomes[0].problem
    for outcome, model in zip(outcomes, models, strict=True):
        agent = outcome.agents[0]
        assert (agent.score.value, agent.score.is_correct, agent.num_turns) == (2.0, True, 3)
        assert agent.score.parts == {"failed_calls": 0.0, "unused_calls": 0.0}
        assert [request.after for request in model.requests] == [None, 0, 1], "turns are appended as tokens"
        (branch,) = outcome.record["agents"][0]["branches"]
        assert [one["content"] for one in branch] == [
            "go\n\nsay 7", "7", "you said 7", "no", "you said no", "7"
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "ending", "problem"),
    [
        ("raise", Ending.ENVIRONMENT_CRASH, "'no such word' (code: EXECUTION_ERROR)"),
        # As null: OpenEnv writes NaN so.
        ("nan", Ending.ENVIRONMENT_CRASH, "no step had a reward that is a number"),
        ("flood", Ending.INFRASTRUCTURE, "a connection is lost"),
    ],
)
def test_what_goes_wrong_in_a_step(echo: RemoteEnvironment, text: str, ending: Ending, problem: str) -> None:
    (outcome,), _ = run_episodes(build_environment(echo), [task()], [text])
    assert outcome.ending is ending and problem in outcome.problem
    (outcome,), _ = run_episodes(build_environment(echo), [task()], ["7"] * 3)
    assert outcome.ending is Ending.COMPLETED, "the server goes on"


def test_a_task_without_the_fields_of_a_reset_is_a_crash(echo: RemoteEnvironment) -> None:
    section = echo.model_copy(update={"task_fields": {"prompt": "prompt"}})
    (outcome,), _ = run_episodes(build_environment(section), [task()], ["7"])
    assert outcome.ending is Ending.ENVIRONMENT_CRASH
    assert "environment.task_fields must have seed too" in outcome.problem


@pytest.mark.parametrize(
    ("section", "given", "text", "max_context_length"),
    [("words", word(turns=50), "it", 60), ("echo", task(), "7", 30)],
    ids=["verifiers", "openenv"],
)
def test_a_session_without_turns_or_room_ends_an_episode_as_any_other(
    section: str, given: Task, text: str, max_context_length: int, request: pytest.FixtureRequest
) -> None:
    environment = build_environment(request.getfixturevalue(section))
    (outcome,), _ = run_episodes(environment, [given], [text] * 50, section={"max_turns": 2})
    assert outcome.ending is Ending.MAX_TURNS and outcome.num_turns == 2, outcome.problem
    (outcome,), _ = run_episodes(environment, [given], [text] * 50, max_context_length=max_context_length)
    assert outcome.ending is Ending.LENGTH and outcome.num_turns > 1, outcome.problem


def test_the_server_finds_its_client_alive_while_the_model_takes_a_long_turn(echo: RemoteEnvironment) -> None:
    """It hangs up on clients that do not answer its pings for half a second."""
    (outcome,), _ = run_episodes(
        build_environment(echo),
        [task()],
        ["7"] * 3,
        before_turn=lambda number: time.sleep(2.5 if number == 1 else 0.0),
    )
    assert outcome.ending is Ending.COMPLETED, outcome.problem


def test_fields_that_the_server_does_not_have_are_found_when_a_bridge_starts(games: Program) -> None:
    text = ("--action.kind", "text", "--action.field")
    for game, options, words in [
        ("words", (*text, "mesage"), "mesage is no field of an action; known: "),
        ("words", (*text, "message", "--observation_field", "reply"), "reply is no field of an observation"),
        ("words", ("--action.kind", "tools"), "code: VALIDATION_ERROR"),
        ("nothing", (), "404"),
        ("words", ("--action.kind", "text"), "needs --action.field"),
    ]:
        program = begin("openenv", *openenv_options(games, game, options))
        assert program.process.wait(120.0) != 0 and words in program.said, program.said


@pytest.fixture(scope="module")
def single(games: Program) -> Iterator[RemoteEnvironment]:
    """A game that the server plays with one at a time."""
    with openenv_bridge(games, "single", *TEXT, "--open_s", "6") as bridge:
        yield bridge.section(task_fields=SEED)


def test_a_server_without_a_free_session_is_waited_for(single: RemoteEnvironment) -> None:
    (first, second), _ = run_episodes(
        build_environment(single),
        [task()] * 2,
        ["7"] * 3,
        before_turn=lambda number: time.sleep(4.0),
    )
    assert sorted([first.ending, second.ending]) == [Ending.COMPLETED, Ending.INFRASTRUCTURE]
    assert "CAPACITY_REACHED" in (first.problem or second.problem)


def test_an_episode_that_is_cancelled_gives_its_session_back(single: RemoteEnvironment) -> None:
    async def go() -> None:
        silent, other = SilentAgent(), SessionAgent("7", "7", "7")
        environment = build_environment(single)
        async with opened(silent), opened(other):
            call = asyncio.ensure_future(environment.rollout(task(), silent))
            await silent.has_begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await environment.rollout(task(), other)).value == 3.0

    asyncio.run(go())


def test_actions_by_the_schema_of_the_server(games: Program) -> None:
    agent = SessionAgent(
        scripted_turn("", ToolCall(id="a", name="step", arguments={"amount": 4})),
        scripted_turn(
            "",
            ToolCall(id="b", name="step", arguments={"amount": 40}),
            ToolCall(id="c", name="leap", arguments={}),
        ),
        scripted_turn(
            "",
            ToolCall(id="d", name="step", arguments={"amount": -3, "sign": "minus"}),
            ToolCall(id="e", name="step", arguments={"amount": 1}),
        ),
    )
    options = ("--observation_field", "total", "--opening", "prompt", "--system_prompt", "Add.")
    with openenv_bridge(games, "sums", *options) as bridge:
        section = bridge.section(task_fields=SEED)
        score = play(section, agent)
        few = play(
            section,
            SessionAgent(scripted_turn("", ToolCall(id="a", name="step", arguments={"amount": 4})), "I stop"),
        )
    assert score.value == pytest.approx(-0.25 + 1.0) and not score.is_correct
    assert score.parts == {"failed_calls": 2.0, "unused_calls": 1.0}
    assert few.value == -0.25, "the model may stop acting"
    (tool,) = agent.tools[0]
    assert tool.name == "step" and tool.description == "Add a number to the sum."
    assert set(tool.parameters["properties"]) == {"amount", "sign"}
    assert tool.parameters["properties"]["sign"]["enum"] == ["plus", "minus"]
    assert [one["content"] for one in agent.heard[0]] == ["Add.", "go"]
    told = [one["content"] for one in agent.heard[-1] if one["role"] == "tool"]
    assert told == [
        "4",
        "Error: this is no action of the environment: amount: 40 is greater than the maximum of 9",
        "Error: there is no tool 'leap'; tools: step",
    ]


def test_the_mcp_tools_of_an_environment(games: Program) -> None:
    agent = SessionAgent(
        scripted_turn("", ToolCall(id="a", name="add", arguments={"a": 1, "b": 2})),
        scripted_turn("", ToolCall(id="b", name="add", arguments={"a": -1, "b": 2})),
        scripted_turn("", ToolCall(id="c", name="add", arguments={"a": 3, "b": 4})),
    )
    options = ("--action.kind", "tools", "--opening", "observation", "--max_result_characters", "30")
    with openenv_bridge(games, "tools", *options) as bridge:
        score = play(bridge.section(task_fields=SEED), agent)
    assert (score.value, score.is_correct) == (1.0, True)
    assert score.parts == {"failed_calls": 1.0, "unused_calls": 0.0}
    (tool,) = agent.tools[0]
    assert tool.name == "add" and tool.description == "Add two numbers."
    assert set(tool.parameters["properties"]) == {"a", "b"}
    first, *_ = agent.heard[0]
    assert "hidden" not in first["content"], "metadata are not for the model"
    results = [one["content"] for one in agent.heard[-1] if one["role"] == "tool"]
    assert results[0] == "3" and results[1].endswith("more characters were cut]")


def test_rounds_end_an_episode_with_the_last_reward(games: Program) -> None:
    options = ("--action.kind", "text", "--action.field", "message", "--reward", "last", "--max_rounds", "2")
    with openenv_bridge(games, "words", *options, "--opening", "observation") as bridge:
        agent = SessionAgent("no", "7")
        assert play(bridge.section(task_fields=SEED), agent).value == 1.0
        assert play(bridge.section(task_fields=SEED), SessionAgent("7", "no")).value == 0.0
    assert [one["content"] for one in agent.heard[0]] == ['{"echo": "say 7", "num_left": 3}']


def test_an_episode_does_not_go_on_in_another_session_of_the_server() -> None:
    """The server is started anew while the model takes its turn; then it dies for good."""
    with contextlib.ExitStack() as stack:
        games = stack.enter_context(openenv_games())
        bridge = stack.enter_context(openenv_bridge(games, "words", *TEXT))
        section = bridge.section(task_fields=SEED)

        def restart(number: int) -> None:
            if number == 1:
                games.kill()
                stack.enter_context(openenv_games(port=int(games.url.rpartition(":")[2])))

        (outcome,), _ = run_episodes(
            build_environment(section), [task()], ["7"] * 3, before_turn=restart, limit_s=200.0
        )
        assert outcome.ending is Ending.INFRASTRUCTURE and "a connection is lost" in outcome.problem
        assert play(section, SessionAgent("7", "7", "7")).value == 3.0
        with pytest.raises(EpisodeInterrupted, match="a connection is lost"):
            play(section, SessionAgent("die"))
        (problem,) = check_environment(section)
        assert problem.field == "environment.url" and "health" in problem.remedy
