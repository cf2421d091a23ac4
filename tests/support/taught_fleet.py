"""A loop of one's own with teachers: two steps of a ``Fleet``, each told in a line of JSON.

``python -m tests.support.taught_fleet --config FILE [KEY=VALUE ...]``
"""

import argparse
import asyncio
import json

import forgeasync as fa
from forgeasync.config import load_config

NUM_STEPS = 2


async def run(config: fa.RunConfig) -> None:
    async with fa.Fleet.start(config) as fleet:
        for _ in range(NUM_STEPS):
            groups = await fleet.sample(fleet.next_tasks(config.algorithm.groups_per_step))
            result = await fleet.train(fleet.items(groups))
            found = result.metrics | fleet.teacher_metrics | {"num_problems": len(fleet.problems)}
            print(json.dumps(found), flush=True)
            await fleet.free(groups)
            await fleet.publish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    asyncio.run(run(load_config(arguments.config, arguments.overrides)))
