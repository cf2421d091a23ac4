"""The training loop of a simulated run: take a batch, make a step, commit, publish, and again."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from forgeasync.buffer import Batch
from forgeasync.profile import Distribution, TrainTable
from forgeasync.rollouts import padded_length, plan_rows
from forgeasync.simulation.clock import Clock
from forgeasync.simulation.draws import Draws
from forgeasync.simulation.shape import SimulatedRun
from forgeasync.simulation.trainer_cost import TrainerCost


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step of the training loop. It begins when the trainer comes for its batch, and ends when it comes
    for the next one."""

    begin_s: float
    end_s: float
    wait_s: float
    train_s: float
    publish_s: float
    """Seconds that training waited to publish."""
    num_trained_tokens: int
    """Response tokens."""
    num_rows: int
    """Rows of each data rank."""
    num_tokens: int
    """Tokens of the slowest data rank."""
    ages: tuple[tuple[int, int], ...]
    """Number of tokens by age in versions."""
    generators_busy_s: float
    """Seconds in which a generator had a sequence, added up over generators, up to the end of the step."""

    @property
    def step_s(self) -> float:
        return self.end_s - self.begin_s


class Training:
    """Makes steps as batches come. ``take`` asks the buffer; ``commit`` tells it; ``publish`` stages."""

    def __init__(
        self,
        run: SimulatedRun,
        table: TrainTable,
        cost: TrainerCost,
        clock: Clock,
        draws: Draws,
        *,
        between_s: Distribution,
        restart_s: float,
        take: Callable[[], Batch | None],
        commit: Callable[[Batch, float], None],
        publish: Callable[[int, Callable[[], None]], None],
        busy_s: Callable[[], float],
        on_ended: Callable[[], None],
    ) -> None:
        self._run = run
        self._table = table
        self._cost = cost
        self._clock = clock
        self._draws = draws
        self._between_s = between_s
        self._restart_s = restart_s
        self._take = take
        self._commit = commit
        self._publish = publish
        self._busy_s = busy_s
        self._on_ended = on_ended
        self._is_idle = True
        self._begin_s = 0.0
        self.version = 0
        self.steps: list[SimulatedStep] = []
        self.lost_s = 0.0
        """Seconds of the trainer's losses: what has to be made again, and its restarts."""

    @property
    def is_over(self) -> bool:
        return len(self.steps) == self._run.num_steps

    def go_on(self) -> None:
        """Take a batch if training waits for one and it is there."""
        if not self._is_idle or self.version == self._run.num_steps:
            return
        batch = self._take()
        if batch is None:
            return
        self._is_idle = False
        wait_s = self._clock.now_s - self._begin_s
        num_rows, num_tokens, work_s = self._work(batch)
        work_s += self._faults_s(work_s)
        begin_s = self._clock.now_s

        def trained() -> None:
            train_s = self._clock.now_s - begin_s
            ages = _ages(batch)
            self._commit(batch, wait_s / (wait_s + train_s))
            self.version += 1
            self._publish(self.version, lambda: published(train_s, ages))

        def published(train_s: float, ages: Counter[int]) -> None:
            publish_s = self._clock.now_s - begin_s - train_s
            self._clock.wall.after(
                self._draws.time_s(self._between_s), lambda: ended(train_s, publish_s, ages)
            )

        def ended(train_s: float, publish_s: float, ages: Counter[int]) -> None:
            self.steps.append(
                SimulatedStep(
                    begin_s=self._begin_s,
                    end_s=self._clock.now_s,
                    wait_s=wait_s,
                    train_s=train_s,
                    publish_s=publish_s,
                    num_trained_tokens=ages.total(),
                    num_rows=num_rows,
                    num_tokens=num_tokens,
                    ages=tuple(sorted(ages.items())),
                    generators_busy_s=self._busy_s(),
                )
            )
            self._begin_s = self._clock.now_s
            self._is_idle = True
            self._on_ended()

        self._clock.compute_in_lockstep(work_s, self._cost.cores, trained)

    def _work(self, batch: Batch) -> tuple[int, int, float]:
        """Rows and tokens of the slowest data rank, and how long the optimizer steps of the batch take."""
        num_rows = num_tokens = 0
        work_s = 0.0
        size = len(batch.groups) // self._run.steps_per_batch
        for start in range(0, len(batch.groups), size):
            lengths = [
                branch.num_tokens
                for group in batch.groups[start : start + size]
                for rollout in group.rollouts
                for branch in rollout.branches
            ]
            plan = plan_rows(
                lengths, tokens_per_row=self._run.tokens_per_row, num_ranks=self._run.num_data_ranks
            )
            tokens = sum(
                max(padded_length(sum(lengths[one] for one in row)) for row in rows) for rows in plan
            )
            work_s += self._cost.time_share * self._table.step_s(len(plan), tokens)
            num_rows += len(plan)
            num_tokens += tokens
        return num_rows, num_tokens, work_s

    def _faults_s(self, work_s: float) -> float:
        """Seconds that losses of the trainer add to a step, which then begins again."""
        lost_s = 0.0
        while (until_s := self._draws.until_fault_s(self._run.faults.trainer_per_s)) < work_s:
            lost_s += until_s + self._restart_s
        self.lost_s += lost_s
        return lost_s


def _ages(batch: Batch) -> Counter[int]:
    ages: Counter[int] = Counter()
    for group in batch.groups:
        for rollout in group.rollouts:
            for branch in rollout.branches:
                for span in branch.version_spans:
                    ages[batch.trainer_version - span.version] += span.end - span.start
    return ages
