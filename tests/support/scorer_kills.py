"""Real scorers that are killed again and again while groups are scored.

python -m tests.support.scorer_kills [number of kills]
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score, Task
from forgeasync.runtime import GroupScoring, ProcessManager, Unscored, start_scorer
from tests.support.config_samples import minimal_config
from tests.support.tiers import Starts, starts

GROUP_SIZE = 4
LIVE_GROUPS = 6
"""So many groups are scored at any time."""


@dataclass(slots=True)
class Killed:
    """Scores groups, half of each before it is whole; what became of them while scorers were killed."""

    is_over: bool = False
    num_groups: int = 0
    lost: tuple[str, ...] = ()
    """Reasons of the groups that have no scores."""
    wrong: tuple[str, ...] = ()
    """Groups with other scores than their own."""
    num_ended: Counter[int] = field(default_factory=Counter)
    """How often each group has ended."""
    metrics: dict[str, float] = field(default_factory=dict)

    async def score(self, groups: GroupScoring) -> None:
        """Score one group after the other until it is over."""
        while not self.is_over:
            group_id, self.num_groups = self.num_groups, self.num_groups + 1
            task = Task(task_id=f"t{group_id}", prompt="?", answer="", source_index=0, source="chain_sum")
            values = [float(GROUP_SIZE * group_id + index) for index in range(GROUP_SIZE)]
            responses = [Response(str(value), 1, FinishReason.STOP) for value in values]
            for index in range(GROUP_SIZE // 2):
                groups.finished(group_id, task, index, responses[index])
            await asyncio.sleep(0.02)
            scores = await groups.score_group(group_id, task, responses)
            self.num_ended[group_id] += 1
            if isinstance(scores, Unscored):
                self.lost += (scores.reason,)
            elif scores != tuple(Score(value, value >= 1.0) for value in values):
                self.wrong += (f"group {group_id}: {scores}",)


@starts(Starts.PROCESSES)
def kill_scorers(num_kills: int, *, num_replicas: int = 2) -> Killed:
    """Kill a scorer whenever two are there and groups have been scored since; see ``Killed``."""
    return asyncio.run(_kill_scorers(num_kills, num_replicas))


async def _kill_scorers(num_kills: int, num_replicas: int) -> Killed:
    rng = random.Random(0)
    config = minimal_config(
        # The value of a response is in its text.
        "data.reward={kind: python, factory: tests.support.own_rewards.slow_value}",
        f"scorer.num_replicas={num_replicas}",
        "scorer.num_workers=1",
    )
    with tempfile.TemporaryDirectory() as folder:
        processes = ProcessManager(Path(folder))
        try:
            groups = await start_scorer(processes, config)
            assert processes.scorer is not None
            watching = asyncio.create_task(processes.scorer.watch())
            killed = Killed()
            running = [asyncio.create_task(killed.score(groups)) for _ in range(LIVE_GROUPS)]
            for number in range(num_kills):
                num_wanted = len(killed.num_ended) + 1 + number % 3
                while len(processes.listing.entries) < 2 or len(killed.num_ended) < num_wanted:
                    assert not watching.done(), watching
                    await asyncio.sleep(0.01)
                one = rng.choice(processes.listing.entries)
                os.kill(one.pid, signal.SIGKILL)
                while one in processes.listing.entries:
                    await asyncio.sleep(0.01)
            killed.is_over = True
            await asyncio.gather(*running)
            while processes.faults.open:
                assert not watching.done(), watching
                await asyncio.sleep(0.01)
            watching.cancel()
            killed.metrics = groups.metrics() | processes.faults.metrics()
            return killed
        finally:
            await processes.close()


if __name__ == "__main__":
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    killed = kill_scorers(num_kills, num_replicas=4)
    twice = sum(num > 1 for num in killed.num_ended.values())
    print(
        f"{num_kills} kills, {killed.num_groups} groups: {len(killed.lost)} lost, "
        f"{len(killed.wrong)} wrong, {twice} scored twice, "
        f"{killed.num_groups - len(killed.num_ended)} without an end"
    )
    for name in sorted(killed.metrics):
        if name.startswith(("score/", "scoring/num_lost", "faults/")) and killed.metrics[name]:
            print(f"  {name} = {killed.metrics[name]:g}")
