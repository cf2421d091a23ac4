"""Attempts at a group, by engines that are plain objects."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from forgeasync.actors.replica import ReplicaLost
from forgeasync.actors.teacher import Untaught
from forgeasync.actors.teaching import Teacher, Teaching
from forgeasync.config.teachers import TeacherSection
from forgeasync.rollouts.task import Task

ROLLOUTS = (SimpleNamespace(num_response_tokens=3), SimpleNamespace(num_response_tokens=4))
NEW = ("new",)
TASK = Task(task_id="t", prompt="1+1", answer="2", source_index=0, source="sums")


@dataclass
class Engines:
    """A pool whose answers are given, one for each attempt; an exception is raised."""

    answers: list[object]
    num_live: int = 0
    most_live: int = 0
    hold: asyncio.Event | None = None
    served: int = 0
    table: "Engines" = field(init=False)

    def __post_init__(self) -> None:
        self.table = self

    @property
    def state(self) -> "Engines":
        return self

    async def assigned(self, num_rollouts: int) -> "Engines":
        self.num_live += num_rollouts
        self.most_live = max(self.most_live, self.num_live)
        return self

    @property
    def number(self) -> int:
        return 7

    def change(self, act: Callable[["Engines"], None]) -> None:
        act(self)

    def ended(self, number: int, num_rollouts: int) -> None:
        assert number == 7
        self.num_live -= num_rollouts

    async def while_there(self, call: Callable[[], Awaitable[object]]) -> object:
        if self.hold is not None:
            await self.hold.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def teaching(engines: Engines, *, max_attempts: int = 3, room: int = 2, limit_s: float = 30.0) -> Teaching:
    teacher = Teacher(
        name="t",
        section=TeacherSection(model_path="x", max_attempts=max_attempts),
        pool=engines,  # type: ignore[arg-type]
        room=asyncio.Semaphore(room),
    )
    return Teaching({"sums": teacher}, limit_s)


def teach(one: Teaching) -> object:
    return asyncio.run(one.teach(4, TASK, ROLLOUTS))  # type: ignore[arg-type]


def test_without_teachers_a_group_comes_back_as_it_is() -> None:
    assert teach(Teaching()) is ROLLOUTS
    assert Teaching().metrics() == {}


def test_lost_engines_and_refused_answers_are_tried_again() -> None:
    engines = Engines([ReplicaLost("it is gone"), Untaught(problem="a nan"), NEW])
    one = teaching(engines)
    assert teach(one) == NEW
    found = one.metrics()
    assert (found["teacher/num_retried"], found["teacher/num_failed"]) == (2, 0)
    assert found["teacher/num_tokens"] == 7 and engines.num_live == 0


def test_attempts_have_an_end_and_a_full_store_has_it_at_once() -> None:
    one = teaching(Engines([ReplicaLost("one"), ReplicaLost("it is gone"), NEW]), max_attempts=2)
    given_up = teach(one)
    assert given_up == Untaught(problem="teacher t, group 4: it is gone")
    assert one.metrics()["teacher/num_failed"] == 1 and one.metrics()["teacher/num_tokens"] == 0
    full = teaching(Engines([Untaught(problem="no room", is_full=True), NEW]))
    found = teach(full)
    assert isinstance(found, Untaught) and found.is_full, "the group is refused for its size"
    assert full.metrics()["teacher/num_retried"] == 0


def test_what_raises_otherwise_is_no_fault_of_the_group() -> None:
    with pytest.raises(KeyError):
        teach(teaching(Engines([KeyError("a bug")])))


def test_an_answer_that_is_late_counts_as_none() -> None:
    engines = Engines([NEW, NEW], hold=asyncio.Event())
    found = teach(teaching(engines, max_attempts=2, limit_s=0.1))
    assert isinstance(found, Untaught) and "timeouts.score_s" in found.problem
    assert engines.num_live == 0


def test_groups_beyond_the_room_wait() -> None:
    async def act() -> None:
        engines = Engines([NEW] * 6)
        one = teaching(engines, room=2)
        engines.hold = asyncio.Event()
        waiting = (one.teach(number, TASK, ROLLOUTS) for number in range(6))  # type: ignore[arg-type]
        groups = [asyncio.create_task(each) for each in waiting]
        for _ in range(20):
            await asyncio.sleep(0)
        assert engines.num_live == 2 * len(ROLLOUTS)
        engines.hold.set()
        assert await asyncio.gather(*groups) == [NEW] * 6
        assert engines.most_live == 2 * len(ROLLOUTS)

    asyncio.run(act())
