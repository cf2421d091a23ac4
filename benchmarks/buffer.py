"""What the replay buffer costs: events a second of the state machine, groups a second through the actor, and
what accounting does to composition and speed.

    python benchmarks/buffer.py

One group's way from submission to training is seven events: submitted, started, progressed, finished, scored,
taken and committed (its share of a batch). The state machine is measured with different numbers of rollouts
under way, in turn, round after round: cost per event must not grow with them. Prints tables and writes
benchmarks/results/buffer.json.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

from buffer_simulation import LengthModel, SimulatedRun, compare, table_rows
from common import REPOSITORY, RESULTS, machine_facts, write_json
from rich.console import Console
from rich.table import Table

from forgeasync.actors import BufferActor, ProcessManager, start_buffer
from forgeasync.buffer import ReplayBuffer
from forgeasync.config import (
    AccountingPolicy,
    AccountingSection,
    AgeOf,
    BatchOrder,
    BufferSection,
    Replacement,
    StaleGroups,
    load_config,
)
from forgeasync.rollouts import (
    FinishReason,
    Group,
    GroupProgress,
    PayloadRef,
    StoredBranch,
    StoredRollout,
    Task,
    VersionSpan,
)

GROUP_SIZE = 8
MAX_OFF_POLICY_STEPS = 32
EVENTS_PER_GROUP = 7
ROLLOUTS_UNDER_WAY = (1_000, 10_000, 100_000)
GROUPS_PER_ROUND = 4_000
ROUNDS = 5
ACTOR_GROUPS = 600
ACTOR_CALLERS = 64
CONFIG = REPOSITORY / "configs" / "tiny_moe_cpu.yaml"


DROP = StaleGroups.DROP
BUFFERS = {
    "deadline, wait, exact": (BufferSection(), AccountingSection()),
    "completion, drop, windowed": (
        BufferSection(stale_groups=DROP, order=BatchOrder.COMPLETION),
        None,
    ),
    "deadline, drop, weight": (
        BufferSection(stale_groups=DROP),
        AccountingSection(replacement=Replacement.WEIGHT),
    ),
}
"""None: a window of half of what may be under way."""


def make_task(index: int) -> Task:
    return Task(task_id=str(index), prompt="", answer="", source_index=index, source="source")


def make_group(group_id: int, version: int) -> Group:
    ref = PayloadRef(host_id="host-0", file="f", payload_id="p", offset=0, num_bytes=0, checksum=0)
    branch = StoredBranch(
        prompt=ref,
        response=ref,
        num_prompt_tokens=64,
        num_response_tokens=128,
        version_spans=(VersionSpan(version=version, start=0, end=128),),
        text="",
    )
    rollout = StoredRollout(generator_rank=0, branches=(branch,), finish_reason=FinishReason.STOP)
    return Group(
        group_id=group_id, draw_id=group_id, task=make_task(group_id), rollouts=(rollout,) * GROUP_SIZE
    )


class FullBuffer:
    """A buffer with so many rollouts under way; each round lets groups come and go."""

    def __init__(self, num_rollouts: int, section: BufferSection, accounting: AccountingSection | None):
        num_groups = num_rollouts // GROUP_SIZE
        self._groups_per_step = max(1, num_groups // (MAX_OFF_POLICY_STEPS + 1))
        if accounting is None:
            accounting = AccountingSection(
                policy=AccountingPolicy.WINDOWED_FIFO,
                window_groups=max(self._groups_per_step, num_groups // 2),
            )
        self._buffer = ReplayBuffer(
            groups_per_step=self._groups_per_step,
            group_size=GROUP_SIZE,
            max_off_policy_steps=MAX_OFF_POLICY_STEPS,
            num_groups_in_run=10**9,
            section=section.model_copy(update={"adapt_load": False}),
            accounting=accounting,
        )
        self._num_tasks = 0
        self._version = 0
        self._started: list[int] = []
        self._start_all()

    def _start_all(self) -> None:
        buffer = self._buffer
        while True:
            for _ in range(buffer.num_wanted):
                buffer.submit(make_task(self._num_tasks))
                self._num_tasks += 1
            start = buffer.start()
            if start is None:
                return
            self._started.append(start.group_id)

    def round(self, num_groups: int) -> float:
        """Seconds that the events of so many groups took, without making the groups."""
        num_steps = max(1, num_groups // self._groups_per_step)
        kept = range(GROUP_SIZE)
        rewards = (0.0,) * GROUP_SIZE
        spent_s, num_events = 0.0, 0
        for _ in range(num_steps):
            ids = self._started[: self._groups_per_step]
            del self._started[: self._groups_per_step]
            groups = [make_group(group_id, self._version) for group_id in ids]
            start_s = time.perf_counter()
            for group in groups:
                self._buffer.progressed(
                    GroupProgress(group_id=group.group_id, version=self._version, num_running=1, num_tokens=9)
                )
                self._buffer.finished(group)
                self._buffer.scored(group.group_id, rewards, kept)
            assert self._buffer.take() is not None
            self._buffer.committed(trainer_wait_share=0.0)
            self._version += 1
            self._buffer.set_served_version(self._version)
            self._start_all()
            self._buffer.events.take()
            spent_s += time.perf_counter() - start_s
            num_events += EVENTS_PER_GROUP * len(groups)
        return num_events / spent_s


_own: FullBuffer
"""Of a process that measures."""


def _fill(name: str, num_rollouts: int) -> None:
    global _own
    _own = FullBuffer(num_rollouts, *BUFFERS[name])


def _round() -> float:
    return _own.round(GROUPS_PER_ROUND)


def measure_events(rounds: int) -> list[dict[str, float | str]]:
    """Events a second of each buffer at each load, the median over interleaved rounds.

    Each buffer has a process of its own: Python's garbage collector would go through the others too.
    """
    keys = [(name, num) for name in BUFFERS for num in ROLLOUTS_UNDER_WAY]
    rates: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
    with ExitStack() as stack:
        processes = {
            key: stack.enter_context(
                ProcessPoolExecutor(
                    max_workers=1, mp_context=get_context("spawn"), initializer=_fill, initargs=key
                )
            )
            for key in keys
        }
        for _ in range(rounds):
            for key, process in processes.items():
                rates[key].append(process.submit(_round).result())
    rows = []
    for (name, num), found in rates.items():
        rate = statistics.median(found)
        smallest = statistics.median(rates[name, ROLLOUTS_UNDER_WAY[0]])
        rows.append({"buffer": name, "rollouts": num, "events_per_s": rate, "cost_ratio": smallest / rate})
    return rows


async def _through_actor(buffer: BufferActor, num_groups: int) -> float:
    """Groups a second, from submission to commit, with many callers at once."""
    ids: asyncio.Queue[int] = asyncio.Queue()
    served_version = 0

    async def collect() -> None:
        for index in range(num_groups):
            start, _ = await buffer.start.call_one()
            await buffer.submit.call_one([make_task(index)])
            await ids.put(start.group_id)

    async def sample() -> None:
        while True:
            group_id = await ids.get()
            await buffer.finished.call_one(make_group(group_id, served_version))
            await buffer.scored.call_one(group_id, (0.0,) * GROUP_SIZE, tuple(range(GROUP_SIZE)))

    async def train(groups_per_step: int) -> None:
        nonlocal served_version
        for step in range(num_groups // groups_per_step):
            await buffer.take.call_one()
            await buffer.committed.call_one(0.0)
            # The other way round a group could start under a version that it is not sampled under.
            served_version = step + 1
            await buffer.set_served_version.call_one(served_version)

    groups_per_step = load_config(CONFIG).algorithm.groups_per_step
    await buffer.submit.call_one([make_task(index) for index in range(groups_per_step)])
    start_s = time.perf_counter()
    # A caller that fails ends the others.
    async with asyncio.TaskGroup() as loops:
        callers = [loops.create_task(one) for one in (collect(), *(sample() for _ in range(ACTOR_CALLERS)))]
        await train(groups_per_step)
        spent_s = time.perf_counter() - start_s
        for caller in callers:
            caller.cancel()
    return num_groups / spent_s


async def measure_actor() -> float:
    config = load_config(
        CONFIG,
        [
            "max_steps=100000",
            "max_off_policy_steps=32",
            "buffer.max_groups=null",
            "buffer.age_of=newest_token",
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        manager = ProcessManager(Path(folder))
        try:
            return await _through_actor(
                await start_buffer(manager, config, Path(folder) / "ledger.jsonl"), ACTOR_GROUPS
            )
        finally:
            await manager.close()


def simulate(num_steps: int) -> dict[str, list[Sequence[str]]]:
    """What accounting does, where the longest rollout takes so many of the 8 steps it has."""
    none = BufferSection(stale_groups=DROP, order=BatchOrder.COMPLETION, adapt_load=False)
    windowed = AccountingSection(policy=AccountingPolicy.WINDOWED_FIFO, window_groups=4 * 24)
    drop = BufferSection(stale_groups=DROP)
    variants = {
        "none": (none, AccountingSection(policy=AccountingPolicy.NONE)),
        "none, load adapted": (
            none.model_copy(update={"adapt_load": True}),
            AccountingSection(policy=AccountingPolicy.NONE),
        ),
        "windowed_fifo": (none, windowed),
        "exact, drop, reissue": (drop, AccountingSection()),
        "exact, drop, weight": (drop, AccountingSection(replacement=Replacement.WEIGHT)),
        "exact, wait": (BufferSection(), AccountingSection()),
        "exact, wait, age_of token": (BufferSection(age_of=AgeOf.TOKEN), AccountingSection()),
    }
    tables = {}
    for steps_of_longest in (4.7, 6.4, 9.3, 17.0):
        run = SimulatedRun(
            sources={
                name: LengthModel(median=median, sigma=1.0, shortest=16, longest=1024)
                for name, median in (("easy", 64.0), ("hard", 160.0))
            },
            num_steps=num_steps,
            groups_per_step=24,
            group_size=8,
            max_off_policy_steps=8,
            max_num_seqs=100_000,
            train_time=1024 / steps_of_longest,
            publish_time=10.0,
        )
        tables[f"longest rollout takes {steps_of_longest} steps"] = table_rows(
            compare(run, variants), baseline="none"
        )
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=500, help="of the simulated runs")
    arguments = parser.parse_args()
    console = Console(width=110)
    events = measure_events(arguments.rounds)
    table = Table("buffer", "rollouts under way", "events/s", "cost per event", title="state machine")
    for row in events:
        table.add_row(
            str(row["buffer"]),
            f"{row['rollouts']:,}",
            f"{row['events_per_s']:,.0f}",
            f"{row['cost_ratio']:.2f}x",
        )
    console.print(table)
    groups_per_s = asyncio.run(measure_actor())
    console.print(f"through the actor: {groups_per_s:,.0f} groups/s")
    simulated = simulate(arguments.steps)
    for title, rows in simulated.items():
        table = Table(
            "buffer", "length distance", "source distance", "speed", "dropped", "oldest", "trainer waits",
            title=title,
        )  # fmt: skip
        for row in rows:
            table.add_row(*row)
        console.print(table)
    results = {"events": events, "actor_groups_per_s": groups_per_s, "simulated": simulated}
    write_json(RESULTS / "buffer.json", {"machine": machine_facts(), **results})


if __name__ == "__main__":
    main()
