"""The generators of a simulated run: the real table of replicas chooses one for every group."""

from collections import deque
from collections.abc import Callable

from forgeasync.faults import ReplicaTable
from forgeasync.profile import Distribution
from forgeasync.rollouts import GroupProgress
from forgeasync.simulation.clock import Clock
from forgeasync.simulation.draws import Draws
from forgeasync.simulation.engine import Engine, EngineCost
from forgeasync.simulation.groups import Sequence, SimulatedGroup
from forgeasync.simulation.shape import SimulatedRun

OnResponse = Callable[[SimulatedGroup, int], None]
"""A response has ended; the number is its place in its group."""


class Generators:
    """Engines by number, and the groups on them."""

    def __init__(
        self,
        run: SimulatedRun,
        cost: EngineCost,
        clock: Clock,
        draws: Draws,
        *,
        call_s: Distribution,
        restart_s: float,
        on_response: OnResponse,
    ) -> None:
        """``restart_s`` is how long it takes until there is another generator in the place of a lost one."""
        self._run = run
        self._cost = cost
        self._clock = clock
        self._draws = draws
        self._call_s = call_s
        self._restart_s = restart_s
        self._on_response = on_response
        self.table = ReplicaTable()
        self.engines: dict[int, Engine] = {}
        self._groups: dict[int, dict[int, SimulatedGroup]] = {}
        """By generator and group."""
        self._unassigned: deque[SimulatedGroup] = deque()
        self.num_moved = 0
        self._ended_busy_s = 0.0
        self.on_change: Callable[[], None] = lambda: None
        """Called when a generator has come or gone."""
        per_host = run.num_replicas // run.num_generator_hosts
        for rank in range(run.num_replicas):
            number = self.table.start(rank, str(rank // per_host))
            self._up(number)

    @property
    def busy_s(self) -> float:
        """Seconds in which a generator had a sequence, added up over generators."""
        return self._ended_busy_s + sum(engine.total_busy_s for engine in self.engines.values())

    @property
    def num_preempted(self) -> int:
        """Sequences that the generators there are had to compute again."""
        return sum(engine.num_preempted for engine in self.engines.values())

    def sample(self, group: SimulatedGroup) -> None:
        """Have a group sampled, as soon as a generator can take it."""
        self._unassigned.append(group)
        self.assign()

    def assign(self) -> None:
        """Give groups that wait to generators, in their order."""
        while self._unassigned:
            number = self.table.assign(self._run.group_size)
            if number is None:
                return
            group = self._unassigned.popleft()
            if group.is_ended:
                self.table.ended(number, self._run.group_size)
                continue
            group.engine = number
            self._groups[number][group.group_id] = group
            delay_s = self._draws.time_s(self._call_s)
            self._clock.wall.after(delay_s, lambda group=group, number=number: self._begin(group, number))

    def cancel(self, group: SimulatedGroup) -> None:
        """Give up a group that is sampled."""
        group.is_ended = True
        if group.engine is not None:
            self.engines[group.engine].remove(group.sequences)
            self._release(group)

    def swap(self, number: int, version: int, stall_s: float, *, recompute: bool) -> list[GroupProgress]:
        """Have a generator sample under a version; returns what it says of its groups."""
        running = self.engines[number].swap(version, stall_s, recompute=recompute)
        progress = []
        for group_id, group in self._groups[number].items():
            _, num_tokens = running.get(group_id, (0, 0))
            progress.append(
                GroupProgress(
                    group_id=group_id,
                    version=version,
                    num_running=self._run.group_size - group.num_finished,
                    num_tokens=num_tokens + sum(one.num_sampled for one in group.sequences),
                )
            )
        return progress

    def lose(self, number: int) -> None:
        """A generator is gone; others go on with its groups, and another one comes in its place."""
        engine = self.engines[number]
        engine.stop()
        self.table.lose(number, "simulated")
        del self.engines[number]
        groups = list(self._groups.pop(number).values())
        engine.remove(one for group in groups for one in group.sequences)
        for group in groups:
            group.engine, group.has_begun = None, False
            if not self._run.keeps_in_flight:
                self._lose_samples(group)
            self.table.ended(number, self._run.group_size)
            self.num_moved += 1
        self._ended_busy_s += engine.total_busy_s
        self._unassigned.extendleft(reversed(groups))
        known = self.table.of(number)
        self._clock.wall.after(self._restart_s, lambda: self._come(known.rank, known.host))
        self.assign()
        self.on_change()

    # ---- inside

    def _lose_samples(self, group: SimulatedGroup) -> None:
        for sequence in group.sequences:
            if not sequence.is_away:
                sequence.begin_anew()

    def _come(self, rank: int, host: str) -> None:
        self._up(self.table.start(rank, host))
        self.assign()
        self.on_change()

    def _up(self, number: int) -> None:
        self.engines[number] = Engine(number, self._cost, self._clock, self._turn_ended, version=0)
        self._groups[number] = {}
        self.table.ready(number)
        rate = self._run.faults.per_generator_per_s
        if rate > 0.0:
            self._clock.wall.after(self._draws.until_fault_s(rate), lambda: self.lose(number))

    def _begin(self, group: SimulatedGroup, number: int) -> None:
        if group.engine == number and not group.is_ended:
            group.has_begun = True
            self.engines[number].add(one for one in group.sequences if not one.is_away)

    def _turn_ended(self, sequence: Sequence) -> None:
        turn, latencies_s = sequence.turn, sequence.rollout.latencies_s
        sequence.turn += 1
        sequence.is_away = True
        if latencies_s:
            self._clock.wall.after(latencies_s[turn], lambda: self._came_back(sequence))
        else:
            self._finish(sequence)

    def _came_back(self, sequence: Sequence) -> None:
        group = sequence.group
        if group.is_ended:
            return
        if sequence.turn == len(sequence.rollout.turns):
            self._finish(sequence)
            return
        sequence.is_away = False
        if group.has_begun and group.engine is not None:
            self.engines[group.engine].add([sequence])

    def _finish(self, sequence: Sequence) -> None:
        group = sequence.group
        group.num_finished += 1
        if group.num_finished == self._run.group_size and group.engine is not None:
            self._release(group)
        self._on_response(group, sequence.index)

    def _release(self, group: SimulatedGroup) -> None:
        number = group.engine
        assert number is not None
        del self._groups[number][group.group_id]
        self.table.ended(number, self._run.group_size)
        group.engine = None
