"""Episodes that a real server of Verifiers runs through our sessions, and what it does when it goes wrong."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from forgeasync.config import Ending, VerifiersServer
from forgeasync.environments import Connection, build_environment, check_environment
from tests.support.adapters.episodes import run_episodes, task
from tests.support.adapters.servers import Server, free_port, verifiers_server

pytestmark = pytest.mark.exhaustive

FIELDS = {"prompt": "prompt", "answer": "answer", "turns": "record.turns", "behaviour": "record.behaviour"}


def section_for(server: Server, **more: object) -> VerifiersServer:
    given = {"kind": "verifiers", "address": f"tcp://127.0.0.1:{server.port}", "task_fields": FIELDS}
    return VerifiersServer.model_validate(given | more)


def word(*, turns: int = 1, behaviour: str = "", **more: object):
    return task(turns=turns, behaviour=behaviour, **more)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with verifiers_server() as server:
        yield server


def until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def is_alive(server: Server) -> None:
    async def go() -> None:
        async with Connection(f"tcp://127.0.0.1:{server.port}") as connection:
            await connection.check_health(limit_s=60.0)

    asyncio.run(go())


def test_rewards_are_scores_and_turns_are_our_own(server: Server) -> None:
    environment = build_environment(section_for(server))
    tasks = [word(turns=turns, answer=answer) for turns, answer in ((1, "it"), (2, "it"), (3, "other"))]
    outcomes, models = run_episodes(environment, tasks, ["it", "that", "it"])
    assert [outcome.problem for outcome in outcomes] == [None] * 3
    assert [outcome.ending for outcome in outcomes] == [Ending.COMPLETED] * 3
    scores = [outcome.agents[0].score for outcome in outcomes]
    assert [score.value for score in scores] == [1.0, 0.5, 0.0]
    assert [score.is_correct for score in scores] == [True, False, False]
    assert [score.parts for score in scores] == [
        {"says_it": 1.0, "words": 1.0},
        {"says_it": 0.5, "words": 2.0},
        {"says_it": 0.0, "words": 3.0},
    ]
    # The server's loop has appended to each turn: no branch was begun, nothing was made from text.
    for number, (outcome, model) in enumerate(zip(outcomes, models, strict=True), start=1):
        agent = outcome.agents[0]
        assert (agent.num_turns, agent.num_rewritten, agent.num_from_text) == (number, 0, 0)
        assert [request.after for request in model.requests] == [None, 0, 1][:number]
        assert agent.session_counts["num_failed"] == agent.session_counts["num_refused"] == 0


def test_no_connections_are_left(server: Server) -> None:
    environment = build_environment(section_for(server))
    run_episodes(environment, [word()] * 8, ["it"])
    before = psutil.Process().num_fds()
    for _ in range(4):
        run_episodes(environment, [word()] * 8, ["it"])
    # libzmq closes sockets in a thread of its own.
    until(lambda: psutil.Process().num_fds() <= before, "file descriptors are left")


def test_whole_records_are_sent_under_their_own_names(server: Server) -> None:
    environment = build_environment(section_for(server, task_fields=None))
    record = {"prompt": "say that", "answer": "that", "turns": 2}
    whole = task(prompt="not sent", answer="not sent")
    whole = type(whole)(
        task_id="t1", prompt="not sent", answer="not sent", source_index=0, source="words", record=record
    )
    (outcome,), _ = run_episodes(environment, [whole], ["that", "that"])
    assert outcome.problem is None and outcome.agents[0].score.value == 1.0
    (branch,) = outcome.record["agents"][0]["branches"]
    assert branch[0]["content"] == "say that"


@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [
        ("nan", "rewards are {'says_it': nan}; must be finite"),
        ("scoring fails", "TaskError: task WordTask scoring: KeyError: 'no such answer'"),
        ("raise", "the harness has broken"),
    ],
)
def test_what_goes_wrong_in_a_rollout_is_a_crash_with_its_words(
    server: Server, behaviour: str, problem: str
) -> None:
    environment = build_environment(section_for(server))
    (outcome,), _ = run_episodes(environment, [word(behaviour=behaviour)], ["it"])
    assert outcome.ending is Ending.ENVIRONMENT_CRASH and problem in outcome.problem
    is_alive(server)


def test_a_task_that_the_server_does_not_take_is_a_crash_with_its_words(server: Server) -> None:
    environment = build_environment(section_for(server))
    wrong, lacking = word(), task(turns=1)
    wrong = type(wrong)(
        task_id="t1", prompt="p", answer="a", source_index=0, source="words",
        record={"turns": "many", "behaviour": ""},
    )  # fmt: skip
    (first, second), _ = run_episodes(environment, [wrong, lacking], ["it"])
    assert first.ending is second.ending is Ending.ENVIRONMENT_CRASH
    assert "the server has refused the episode: ValidationError" in first.problem and "turns" in first.problem
    assert "environment.task_fields.behaviour = 'record.behaviour'" in second.problem
    assert "it has turns" in second.problem


def test_turns_and_room_that_run_out_end_the_episode_as_in_every_other_environment(server: Server) -> None:
    environment = build_environment(section_for(server))
    (outcome,), _ = run_episodes(environment, [word(turns=5)], ["it"] * 5, section={"max_turns": 2})
    assert outcome.ending is Ending.MAX_TURNS and outcome.num_turns == 2, outcome.problem
    (outcome,), _ = run_episodes(environment, [word(turns=50)], ["it"] * 50, max_context_length=60)
    assert outcome.ending is Ending.LENGTH and outcome.num_turns > 1, outcome.problem


def test_a_rollout_that_hangs_is_cut_off_by_our_deadline_and_given_up_there(server: Server) -> None:
    environment = build_environment(section_for(server))
    (outcome,), _ = run_episodes(
        environment, [word(behaviour="hang")], ["it"], section={"setup_s": 3.0}, limit_s=60.0
    )
    assert outcome.ending is Ending.TIMEOUT and "episodes.setup_s" in outcome.problem
    until(lambda: server.log.count("cancelled run") == 1, "the server still runs what nobody waits for")


def test_a_server_that_does_not_answer_is_lost(server: Server) -> None:
    """It never answers again, so the next test needs another one."""
    environment = build_environment(section_for(server, health_s=1.0))
    (outcome,), _ = run_episodes(environment, [word(behaviour="block")], ["it"])
    assert outcome.ending is Ending.INFRASTRUCTURE
    assert "has not answered for 2 s" in outcome.problem
    (problem,) = check_environment(section_for(server, health_s=1.0))
    assert problem.field == "environment.address" and "has not answered for 1 s" in problem.remedy


def test_episodes_reach_a_server_that_comes_up_later_and_lose_one_that_is_killed(server: Server) -> None:
    environment = build_environment(section_for(server, health_s=120.0))
    server.kill()
    starting = threading.Thread(target=server.start)
    starting.start()
    outcomes, _ = run_episodes(
        environment, [word(turns=2)] * 8, ["it"] * 2, section={"setup_s": 150.0}, limit_s=200.0
    )
    starting.join()
    assert [outcome.ending for outcome in outcomes] == [Ending.COMPLETED] * 8, outcomes[0].problem
    assert not list(check_environment(section_for(server)))

    def kill(number: int) -> None:
        if number == 1:
            server.kill()

    (outcome,), _ = run_episodes(environment, [word(turns=3)], ["it"] * 3, before_turn=kill)
    assert outcome.ending is Ending.INFRASTRUCTURE
    assert "has closed the connection" in outcome.problem


def test_a_server_that_is_not_there_is_found_before_the_run() -> None:
    section = VerifiersServer(kind="verifiers", address=f"tcp://127.0.0.1:{free_port()}", health_s=0.3)
    (problem,) = check_environment(section)
    assert problem.field == "environment.address" and "start the environment server" in problem.remedy
