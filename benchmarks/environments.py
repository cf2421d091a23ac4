"""What many live episodes cost: episodes a second, lag of the controller's loop, and idle generators.

    python benchmarks/environments.py [--model models/tiny_moe] [--seconds 40] [--live 32 128 512]
        [--out FILE.json]

Runs episodes of three turns on real workers and a real generator, without a trainer; whenever a group ends
the next one starts, so that the number of live episodes stays. Each pause between two turns is drawn from 0.1
to 10 s, evenly on a logarithmic scale. Then the same with tools that take 0 s and 5 s: with enough live
episodes the generator is as busy with the slow ones. The lag is how late a task of the controller's loop that
sleeps for 5 ms wakes up.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import RESULTS, machine_facts, write_json
from rich.console import Console
from rich.table import Table

import forgeasync as fa
from forgeasync.actors import (
    GeneratorRouter,
    GroupEpisodes,
    Procs,
    SampledGroup,
    agent_roles,
    start_environment,
    start_generators,
)
from forgeasync.config import load_config
from forgeasync.controller import run_main
from forgeasync.models import read_model_facts

GROUP_SIZE = 8
CONFIG = Path(__file__).parents[1] / "configs" / "tiny_moe_cpu.yaml"
TICK_S = 0.005


class Lag:
    """How late a task wakes up, in milliseconds."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []

    async def watch(self) -> None:
        while True:
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late_ms.append(1000 * (time.perf_counter() - due_s))


class Case(NamedTuple):
    name: str
    num_live: int
    pauses: tuple[float, float]
    """Shortest and longest, in seconds."""


async def measure(model: Path, case: Case, *, seconds: float) -> None:
    """Keep so many episodes live for a while, and print figures of the time after the first ones' end."""
    shortest_s, longest_s = case.pauses
    config = load_config(
        CONFIG,
        [
            f"model.path={model}",
            "data.num_train=64",
            "data.num_held_out=8",
            "evaluation.num_problems=8",
            "generator.num_replicas=1",
            f"episodes.max_live_per_worker={max(256, case.num_live)}",
            f"algorithm.group_size={GROUP_SIZE}",
            f"environment={{kind: python, factory: benchmarks.episode_pauses.Pauses, "
            f"options: {{shortest_s: {shortest_s}, longest_s: {longest_s}}}}}",
        ],
    )
    task = fa.Task(task_id="t", prompt="12+3", answer="15", source_index=0, source="pauses")
    with tempfile.TemporaryDirectory() as folder:
        procs = Procs(Path(folder))
        try:
            facts = read_model_facts(str(model))
            generators, pool = await asyncio.gather(
                start_generators(procs, config, facts, model.resolve()),
                start_environment(procs, config, model.resolve(), print),
            )
            assert pool is not None
            await pool.connect(generators.known)
            groups = GroupEpisodes(
                pool,
                generators,
                roles=agent_roles(None),
                group_size=GROUP_SIZE,
                sampling=config.sampling,
                section=config.episodes,
                max_lost_per_group=config.generator.max_lost_per_group,
            )
            figures = await _keep_live(
                groups, generators, task, num_groups=case.num_live // GROUP_SIZE, seconds=seconds
            )
            print(json.dumps(figures), flush=True)
        finally:
            await procs.close()


async def _keep_live(
    groups: GroupEpisodes, generators: GeneratorRouter, task: fa.Task, *, num_groups: int, seconds: float
) -> dict[str, float]:
    next_id, num_ended = 0, 0

    async def one_after_the_other() -> None:
        nonlocal next_id, num_ended
        while True:
            group_id, next_id = next_id, next_id + 1
            answer = await groups.sample(group_id, task, seed=None)
            assert isinstance(answer, SampledGroup), answer
            num_ended += GROUP_SIZE
            await generators.free_payloads(answer.rollouts)

    lag = Lag()
    running = [asyncio.create_task(one_after_the_other()) for _ in range(num_groups)]
    watching = asyncio.create_task(lag.watch())
    # Until the first groups have ended and others are in the middle.
    await asyncio.sleep(min(15.0, seconds / 2))
    lag.late_ms.clear()
    ended_before, start_s = num_ended, time.perf_counter()
    (before,) = await generators.stats()
    await asyncio.sleep(seconds)
    (after,) = await generators.stats()
    taken_s = time.perf_counter() - start_s
    num_live = groups.metrics()["environment/num_live_episodes"]
    for task_ in (*running, watching):
        task_.cancel()
    await asyncio.gather(*running, watching, return_exceptions=True)
    late_ms = np.array(lag.late_ms)
    return {
        "num_live": num_live,
        "episodes_per_s": (num_ended - ended_before) / taken_s,
        "tokens_per_s": (after.num_generated_tokens - before.num_generated_tokens) / taken_s,
        "generator_idle_share": 1.0 - min(1.0, (after.busy_s - before.busy_s) / taken_s),
        "lag_p50_ms": float(np.percentile(late_ms, 50)),
        "lag_p99_ms": float(np.percentile(late_ms, 99)),
        "lag_max_ms": float(late_ms.max()),
    }


def run_apart(model: Path, case: Case, *, seconds: float) -> dict[str, float]:
    """Measure in a process of its own: Monarch ends one in which messages to lost procs come back."""
    command = [sys.executable, __file__, "--model", str(model), "--seconds", str(seconds)]
    command += ["--one", str(case.num_live), *map(str, case.pauses)]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(finished.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="What many live episodes cost.")
    parser.add_argument("--model", type=Path, default=Path("models/tiny_moe"))
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--live", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--out", type=Path, default=RESULTS / "environments.json")
    parser.add_argument("--one", nargs=3, metavar=("LIVE", "SHORTEST_S", "LONGEST_S"))
    arguments = parser.parse_args()
    if arguments.one is not None:
        num_live, shortest_s, longest_s = arguments.one
        case = Case("", int(num_live), (float(shortest_s), float(longest_s)))
        run_main(measure(arguments.model, case, seconds=arguments.seconds))
        return
    cases = [Case(f"{num} live, pauses 0.1 to 10 s", num, (0.1, 10.0)) for num in arguments.live]
    cases += [
        Case("32 live, tools of 0 s", 32, (0.0, 0.0)),
        # 5 s on average, and not all of them at the same time.
        Case("512 live, tools of 5 s", 512, (4.0, 6.2)),
        Case("1024 live, tools of 5 s", 1024, (4.0, 6.2)),
    ]
    results = {case.name: run_apart(arguments.model, case, seconds=arguments.seconds) for case in cases}
    columns = list(next(iter(results.values())))
    table = Table("", *columns, title="live episodes")
    for name, figures in results.items():
        table.add_row(name, *(f"{figures[column]:.3g}" for column in columns))
    Console().print(table)
    write_json(arguments.out, {"machine": machine_facts(), "results": results})


if __name__ == "__main__":
    main()
