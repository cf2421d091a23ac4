"""One run in simulated time: the loops of ``apps/grpo.py`` as events around the real state machines.

Real are the buffer, with its accounting and its control of load; the table that chooses generators; the
dispatcher of scorers; the budget of payloads; the ledger of weights; the order of the data; the plan of rows.
Simulated are the times between their events (``forgeasync.profile``). docs/simulation.md says what is not
modelled.
"""

import gc
from dataclasses import replace

from forgeasync.buffer import Batch, DropReason, ReplayBuffer, Start
from forgeasync.config import Interruption
from forgeasync.profile import Profile, TrainTable
from forgeasync.rollouts import Group, GroupProgress, PayloadBudget, largest_excess
from forgeasync.simulation.clock import Clock
from forgeasync.simulation.draws import Draws
from forgeasync.simulation.engine import engine_cost
from forgeasync.simulation.generators import Generators
from forgeasync.simulation.groups import SimulatedGroup
from forgeasync.simulation.prediction import GroupCounts, Prediction
from forgeasync.simulation.scorers import Scorers
from forgeasync.simulation.serving import Serving
from forgeasync.simulation.shape import SimulatedRun
from forgeasync.simulation.thread import Thread
from forgeasync.simulation.trainer_cost import trainer_cost
from forgeasync.simulation.training import Training


def simulate(run: SimulatedRun, profile: Profile) -> Prediction:
    """Play a run from its first step to its last one. The same run and profile give the same prediction."""
    simulation = RunSimulation(run, profile)
    was_enabled = gc.isenabled()
    # A collection goes through all groups, again and again; none of them is in a circle once it has ended.
    gc.disable()
    try:
        return simulation.simulate()
    finally:
        if was_enabled:
            gc.enable()


def simulate_seeds(run: SimulatedRun, profile: Profile, *, num_seeds: int) -> list[Prediction]:
    """Play a run with so many seeds, which no other seed of the run shares: one of them draws lengths with
    another mean."""
    seeds = range(num_seeds * run.seed, num_seeds * (run.seed + 1))
    return [simulate(replace(run, seed=seed), profile) for seed in seeds]


class RunSimulation:
    """The loops of one run and what they share."""

    def __init__(self, run: SimulatedRun, profile: Profile) -> None:
        self._run = run
        self._profile = profile
        num_cores = profile.hardware.num_cores * run.num_generator_hosts
        # A split may have more ranks than the trainer that was measured, or fewer.
        trainer = trainer_cost(profile, num_data_ranks=run.num_data_ranks)
        self.clock = Clock(
            num_cores,
            engine_crowding=profile.cores.generator_crowding,
            lockstep_lag=trainer.lag,
            lockstep_crowding=profile.cores.trainer_crowding,
        )
        self._draws = Draws(run, profile)
        cost = engine_cost(
            profile,
            max_num_seqs=run.max_num_seqs,
            max_kv_tokens=run.max_kv_tokens,
            shares_prefixes=run.weights.prefix_cache_across_versions,
        )
        self._decode = cost.decode
        self.buffer = ReplayBuffer(
            groups_per_step=run.groups_per_step,
            group_size=run.group_size,
            max_off_policy_steps=run.max_off_policy_steps,
            num_groups_in_run=run.num_steps * run.groups_per_step,
            section=run.buffer,
            accounting=run.accounting,
        )
        self._payloads = _payload_budget(run)
        self.generators = Generators(
            run,
            cost,
            self.clock,
            self._draws,
            call_s=profile.call_s,
            restart_s=profile.generator_start_s.mean,
            on_response=self._response_ended,
        )
        self._controller, self._loops = Thread(self.clock), Thread(self.clock)
        """What controller and buffer do meanwhile."""
        self._scorers = Scorers(
            run.scorer,
            profile.cores.scorer,
            self.clock,
            self._scored,
            num_places=profile.score_places,
        )
        self._serving = Serving(
            run.weights,
            profile.weights,
            self.generators,
            self.clock,
            self._draws,
            num_hosts=run.num_generator_hosts,
            cores=profile.cores,
            on_progress=self._progressed,
            on_served=self._served,
        )
        self._training = Training(
            run,
            TrainTable(profile.train),
            trainer,
            self.clock,
            self._draws,
            between_s=profile.between_steps_s,
            restart_s=profile.trainer_start_s.mean,
            take=self.buffer.take,
            commit=self._commit,
            publish=self._serving.publish,
            busy_s=lambda: self.generators.busy_s,
            # The next batch makes room for groups.
            on_ended=self._go_on,
        )
        self._groups: dict[int, SimulatedGroup] = {}
        """Those in flight."""
        self._refused: Start | None = None
        """A group that waits for memory."""
        self._held: list[Group] = []
        """Trained groups whose arrays the trainer may have to read again."""
        self._counts = GroupCounts()
        self._is_going_on = False

    def simulate(self) -> Prediction:
        """Play the run."""
        for _ in range(self._run.groups_per_step):
            self.buffer.submit(self._draws.order.next())
        self._go_on()
        while not self._training.is_over:
            has_gone_on = self.clock.step()
            assert has_gone_on, "nothing will ever happen again"
        return Prediction(
            steps=tuple(self._training.steps),
            steady_steps=self._run.steady_steps,
            num_replicas=self._run.num_replicas,
            counts=self._counts,
            num_in_flight=self.buffer.num_in_flight,
            num_complete=self.buffer.num_complete,
            num_dropped={reason.value: num for reason, num in self.buffer.num_dropped.items() if num},
            num_preempted=self.generators.num_preempted,
            num_moved=self.generators.num_moved,
            trainer_lost_s=self._training.lost_s,
            num_beyond_decode=self._decode.num_beyond,
            largest_train_error=TrainTable(self._profile.train).largest_error,
        )

    def _go_on(self) -> None:
        """Whatever the buffer lets happen now: groups start, and the trainer takes its batch."""
        if self._is_going_on:
            # Who is in the middle of this sees what has changed.
            return
        self._is_going_on = True
        self._training.go_on()
        while self._start_one():
            pass
        self._is_going_on = False

    def _start_one(self) -> bool:
        start = self._refused
        if start is None:
            start = self.buffer.start()
            if start is None:
                return False
            for _ in range(self.buffer.num_wanted):
                self.buffer.submit(self._draws.order.next())
            self._counts.started(start.group_id, self.clock.now_s)
        self._refused = None
        if not self._payloads.reserve(start.group_id, self._run.largest_group_bytes):
            # Those that come later must not overtake it.
            self._refused = start
            return False
        rollouts = self._draws.group(start.task, start.draw_id)
        group = SimulatedGroup(start, rollouts, self.clock.now_s)
        self._groups[start.group_id] = group
        self.generators.sample(group)
        return True

    # ---- events

    def _response_ended(self, group: SimulatedGroup, index: int) -> None:
        is_whole = group.num_finished == self._run.group_size
        self._controller.do(
            self._profile.controller_s.mean, lambda: self._handled(group, index, is_whole=is_whole)
        )

    def _handled(self, group: SimulatedGroup, index: int, *, is_whole: bool) -> None:
        if group.is_ended:
            # It was given up before the controller came to it.
            return
        self._loops.do(self._profile.loops_s.mean, lambda: None)
        if not self._run.has_environment:
            self._scorers.response_ended(group, index)
        if is_whole:
            self._sampled(group)

    def _sampled(self, group: SimulatedGroup) -> None:
        stored = group.stored(generator_rank=0)
        if not self._payloads.settle(group.group_id, self._num_bytes(group)):
            self._scorers.forget(group)
            self._give_up(group, DropReason.OVERSIZED)
            return
        self.buffer.finished(stored)
        if self._run.has_environment:
            self._scored(group)
        else:
            self._scorers.group_ended(group)

    def _scored(self, group: SimulatedGroup) -> None:
        if self._draws.is_filtered(group.start.draw_id):
            self._give_up(group, DropReason.FILTERED)
            return
        group.is_ended = True
        del self._groups[group.group_id]
        group.sequences.clear()
        size = self._run.group_size
        self._counts.ended(group.group_id, self.clock.now_s)
        for lost in self.buffer.scored(group.group_id, [0.0] * size, range(size)):
            self._payloads.release(lost.group_id)
        self._go_on()

    def _give_up(self, group: SimulatedGroup, reason: DropReason) -> None:
        group.is_ended = True
        del self._groups[group.group_id]
        group.sequences.clear()
        self._payloads.release(group.group_id)
        self._counts.ended(group.group_id, self.clock.now_s)
        self.buffer.failed(group.group_id, reason)
        self._go_on()

    def _commit(self, batch: Batch, trainer_wait_share: float) -> None:
        committed = self.buffer.committed(trainer_wait_share=trainer_wait_share)
        # Nobody keeps a ledger of this run.
        self.buffer.events.take()
        self._counts.num_trained += len(batch.groups)
        self._held += batch.groups
        for group in committed.lost:
            self._payloads.release(group.group_id)
        if len(self._held) >= self._run.num_groups_held:
            for group in self._held:
                self._payloads.release(group.group_id)
            self._held.clear()
        if self._run.weights.interruption is Interruption.CANCEL_STALE:
            for group_id in committed.cancelled:
                self._cancel(group_id)
        self._go_on()

    def _cancel(self, group_id: int) -> None:
        """Give up a group that is sampled; one that waits for its scores goes on."""
        group = self._groups.get(group_id)
        if group is None or group.num_finished == self._run.group_size:
            return
        self.generators.cancel(group)
        self._scorers.forget(group)
        self._give_up(group, DropReason.CANCELLED)

    def _progressed(self, groups: list[GroupProgress]) -> None:
        for progress in groups:
            self.buffer.progressed(progress)

    def _served(self, version: int) -> None:
        self.buffer.set_served_version(version)
        self._go_on()

    def _num_bytes(self, group: SimulatedGroup) -> int:
        """What its arrays take: as much of a reservation as its tokens are of the most that it can have."""
        longest = max(1, self._run.longest_group_tokens)
        return round(self._run.largest_group_bytes * min(1.0, group.num_tokens / longest))


def _payload_budget(run: SimulatedRun) -> PayloadBudget:
    """Return the memory for the arrays of the run's groups.

    Raises:
        ValueError: it has no room for those that are held at once.
    """
    excess = largest_excess(run.payload_capacity_bytes, run.num_groups_held, run.largest_group_bytes)
    if excess < 0:
        raise ValueError(
            f"payload_capacity_bytes = {run.payload_capacity_bytes:,} must be at least "
            f"{run.num_groups_held} groups held x {run.largest_group_bytes:,} bytes"
        )
    return PayloadBudget(run.payload_capacity_bytes, excess_bytes=excess)
