"""What slow scorers cost: groups a second and idle generators, by the time of a score and the pool's size.

    python benchmarks/scoring.py [--model models/tiny_moe] [--seconds 20] [--pools 1 4 16]
        [--sleeps 0 0.2 2] [--live 24] [--out FILE.json]

Samples groups on a real generator and scores them on real scorers, without a trainer. As in a run, the number
of groups that are sampled or scored is bounded (``--live``); whenever one ends the next one begins. Scores
begin while others of their group are still sampled. Each pool is a process of its own.
"""

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import RESULTS, machine_facts, write_json
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import forgeasync as fa
from forgeasync.actors import (
    GeneratorRouter,
    GroupScoring,
    Procs,
    ResponseGroups,
    SampledGroup,
    start_generators,
    start_scorer,
)
from forgeasync.config import load_config, named_sources
from forgeasync.controller import run_main
from forgeasync.environments import response_of
from forgeasync.models import read_model_facts
from forgeasync.rollouts import PromptEncoder

CONFIG = Path(__file__).parents[1] / "configs" / "tiny_moe_cpu.yaml"
GROUP_SIZE = 8
SETTLE_S = 5.0
"""Before a case is measured: groups of the case before it have ended by then."""


class Load:
    """Keeps so many groups sampled or scored at any time."""

    def __init__(
        self, groups: ResponseGroups, scoring: GroupScoring, generators: GeneratorRouter, task: fa.Task
    ) -> None:
        self._groups = groups
        self._scoring = scoring
        self._generators = generators
        self.task = task
        self.num_ended = 0
        self._next_id = 0

    async def one_after_the_other(self) -> None:
        while True:
            group_id, self._next_id = self._next_id, self._next_id + 1
            task = self.task
            answer = await self._groups.sample(group_id, task, seed=group_id)
            assert isinstance(answer, SampledGroup), answer
            responses = [response_of(rollout) for rollout in answer.rollouts]
            scores = await self._scoring.score_group(group_id, task, responses)
            assert isinstance(scores, tuple), scores
            self.num_ended += 1
            await self._generators.free_payloads(answer.rollouts)


async def measure(
    model: Path, pool: int, sleeps_s: list[float], *, live: int, seconds: float
) -> list[dict[str, float]]:
    """Figures of each sleep, one after the other on the same scorers."""
    config = load_config(
        CONFIG,
        [
            f"model.path={model}",
            "data.num_train=64",
            "data.num_held_out=8",
            "evaluation.num_problems=8",
            "generator.num_replicas=1",
            f"algorithm.group_size={GROUP_SIZE}",
            "data.reward={kind: python, factory: benchmarks.sleeping_reward.sleeping}",
            f"scorer.num_replicas={pool}",
            "scorer.num_workers=1",
            f"scorer.max_in_flight={max(16, live * GROUP_SIZE)}",
            f"scorer.max_concurrent={live}",
            "timeouts.setup_s=900",
        ],
    )
    (source,) = named_sources(config.data)
    task = fa.Task(
        task_id="t", prompt="12+3", answer="15", source_index=0, source=source.name, record={"sleep_s": 0.0}
    )
    with tempfile.TemporaryDirectory() as folder:
        procs = Procs(Path(folder))
        try:
            facts = read_model_facts(str(model))
            # One after the other: 16 scorers that start keep an engine from starting in time on few cores.
            generators = await start_generators(procs, config, facts, model.resolve())
            scoring = await start_scorer(procs, config)
            prompts = PromptEncoder.of_section(AutoTokenizer.from_pretrained(model), config.data)
            groups = ResponseGroups(
                generators, scoring, prompts, group_size=GROUP_SIZE, sampling=config.sampling
            )
            load = Load(groups, scoring, generators, task)
            running = [asyncio.create_task(load.one_after_the_other()) for _ in range(live)]
            results = []
            for sleep_s in sleeps_s:
                load.task = dataclasses.replace(task, record={"sleep_s": sleep_s})
                await asyncio.sleep(SETTLE_S + sleep_s)
                ended_before, start_s = load.num_ended, time.perf_counter()
                early_before = scoring.metrics()["score/num_early"]
                (before, *_) = await generators.stats()
                await asyncio.sleep(seconds)
                (after, *_) = await generators.stats()
                taken_s = time.perf_counter() - start_s
                num_groups = load.num_ended - ended_before
                num_early = scoring.metrics()["score/num_early"] - early_before
                assert not any(one.done() for one in running), running
                results.append(
                    {
                        "pool": pool,
                        "sleep_s": sleep_s,
                        "groups_per_s": num_groups / taken_s,
                        "tokens_per_s": (after.num_generated_tokens - before.num_generated_tokens) / taken_s,
                        "generator_idle_share": 1.0 - min(1.0, (after.busy_s - before.busy_s) / taken_s),
                        "early_share": num_early / max(1, num_groups * GROUP_SIZE),
                    }
                )
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            return results
        finally:
            await procs.close()


def run_apart(arguments: argparse.Namespace, pool: int) -> list[dict[str, float]]:
    """Measure in a process of its own: Monarch ends one in which messages to lost procs come back."""
    command = [sys.executable, __file__, "--model", str(arguments.model), "--seconds", str(arguments.seconds)]
    command += ["--live", str(arguments.live), "--sleeps", *map(str, arguments.sleeps), "--one", str(pool)]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(finished.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="What slow scorers cost.")
    parser.add_argument("--model", type=Path, default=Path("models/tiny_moe"))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pools", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--sleeps", type=float, nargs="+", default=[0.0, 0.2, 2.0])
    parser.add_argument("--live", type=int, default=24)
    parser.add_argument("--out", type=Path, default=RESULTS / "scoring.json")
    parser.add_argument("--one", type=int, metavar="POOL")
    arguments = parser.parse_args()

    async def measure_one() -> None:
        figures = await measure(
            arguments.model,
            arguments.one,
            arguments.sleeps,
            live=arguments.live,
            seconds=arguments.seconds,
        )
        print(json.dumps(figures), flush=True)

    if arguments.one is not None:
        run_main(measure_one())
        return
    results = []
    for pool in arguments.pools:
        results += run_apart(arguments, pool)
        # What was measured stays if a larger pool does not fit on the machine.
        write_json(arguments.out, {"machine": machine_facts(), "results": results})
    columns = list(results[0])
    table = Table(*columns, title="slow scorers")
    for figures in results:
        table.add_row(*(f"{figures[column]:.3g}" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
