"""Commands that take all they can get end in time, leave nothing behind and leave the host alone."""

import asyncio
import functools
import json

import pytest

from tests.support import other_user, resource_scenarios
from tests.support.resource_scenarios import COMMANDS, DEADLINE_S, ENDED_BY, SMALL, Outcome

USERS = ("this user", "nobody")

LARGEST_LAG_S = 0.5 * DEADLINE_S
"""A loop that waited for a box would stand still for the whole deadline."""


@functools.cache
def outcomes(user: str) -> dict[str, Outcome]:
    if user == "nobody":
        if (problem := other_user.why_not()) is not None:
            pytest.skip(problem)
        found = json.loads(other_user.run_as_nobody(resource_scenarios.__name__))
        return {name: Outcome(**one) for name, one in found.items()}
    return resource_scenarios.run_all()


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_greedy_command_ends_and_leaves_nothing(name: str, user: str) -> None:
    outcome = outcomes(user)[name]
    assert outcome.killed_by in ENDED_BY[name], outcome
    assert outcome.timed_out == (outcome.killed_by == "deadline"), outcome
    assert outcome.num_left == 0 and outcome.num_left_after_close == 0, outcome
    assert outcome.memory_growth_mib < 8, outcome
    # Whoever kills or stops the supervisor has no box any more.
    assert outcome.box_works == (name not in ("stop_all", "kill_all")), outcome


@pytest.mark.parametrize("user", USERS)
def test_bytes_files_memory_and_output_are_limited(user: str) -> None:
    found = outcomes(user)
    assert 0 < int(found["disk"].stdout) <= SMALL.disk_mib * 2**20
    num, _, why = found["files"].stdout.partition(" ")
    assert SMALL.max_files - 10 <= int(num) <= SMALL.max_files and "No space" in why
    # Python is told of its memory and ends by itself; nobody has to kill it.
    assert found["memory"].exit_code == 1
    for name in ("long_output", "long_errors"):
        assert found[name].num_cut == 5_000_000 - SMALL.output_kib * 2**10
    assert found["long_output"].stdout == "y" * 2000


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMMANDS)
def test_the_event_loop_goes_on_beside_a_greedy_command(name: str) -> None:
    assert outcomes("this user")[name].largest_lag_s < LARGEST_LAG_S


@pytest.mark.exhaustive
def test_sixteen_fork_bombs_at_once_end_in_time() -> None:
    async def run() -> list[Outcome]:
        return await asyncio.gather(*(resource_scenarios.run("fork") for _ in range(16)))

    for outcome in asyncio.run(run()):
        assert outcome.timed_out and outcome.num_left_after_close == 0, outcome
