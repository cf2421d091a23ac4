"""The table of environment workers against a naive model, in random histories."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forgeasync.runtime import WorkerTable

ROOM = 3


class WorkersComeAndGo(RuleBasedStateMachine):
    """Episodes are given to workers that start, die and retire."""

    def __init__(self) -> None:
        super().__init__()
        self.table = WorkerTable(max_live_per_worker=ROOM)
        self.starting: set[int] = set()
        self.ready: set[int] = set()
        self.retiring: set[int] = set()
        self.gone: set[int] = set()
        self.live: list[int] = []
        """The worker of each episode under way, on workers that may be gone."""

    @rule()
    def start(self) -> None:
        number = self.table.start()
        assert number not in self.starting | self.ready | self.retiring | self.gone
        self.starting.add(number)

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def becomes_ready(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.starting)))
        self.table.ready(number)
        self.starting.remove(number)
        self.ready.add(number)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def retires(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.ready)))
        self.table.retire(number)
        self.ready.remove(number)
        self.retiring.add(number)

    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        known = self.starting | self.ready | self.retiring | self.gone
        number = data.draw(st.sampled_from([99, *sorted(known)]))
        num_lost = self.table.num_lost
        self.table.lose(number)
        is_news = number in known - self.gone
        assert self.table.num_lost == num_lost + is_news
        for one in (self.starting, self.ready, self.retiring):
            one.discard(number)
        if is_news:
            self.gone.add(number)
        self.table.ready(number) if number in self.gone else None

    @rule()
    def an_episode_begins(self) -> None:
        rooms = {number: self.live.count(number) for number in self.ready}
        number = self.table.assign()
        if number is None:
            assert all(num_live == ROOM for num_live in rooms.values())
        else:
            assert rooms[number] == min(rooms.values()) < ROOM
            self.live.append(number)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def an_episode_ends(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.table.ended(self.live.pop(index))

    @invariant()
    def knows_who_is_there(self) -> None:
        present = self.starting | self.ready | self.retiring
        assert set(self.table.numbers) == present
        assert self.table.num_live == sum(number in present for number in self.live)
        assert set(self.table.retired) == {one for one in self.retiring if one not in self.live}


TestWorkersComeAndGo = WorkersComeAndGo.TestCase
TestWorkersComeAndGo.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
