"""Expert iteration as a training loop of your own: sample, keep the right responses, imitate them, publish.

    make model
    python examples/expert_iteration.py [key.path=value ...]

Sources: Anthony et al., "Thinking Fast and Slow with Deep Learning and Tree Search", 2017; for reasoning,
Zelikman et al., "STaR", 2022.
"""

import asyncio
import sys

import forgeasync as fa

NUM_STEPS = 4
"""Number of optimizer steps on the responses that a round keeps."""


async def main(config: fa.RunConfig) -> None:
    supervised = fa.Loss(objective=fa.Supervised())
    async with fa.Fleet.start(config, loss=supervised) as fleet:
        print(f"before: {await fleet.evaluate()}", flush=True)
        for number in range(1, config.max_steps + 1):
            groups = await fleet.sample(fleet.next_tasks(config.algorithm.groups_per_step))
            right = [
                rollout
                for group in groups
                for rollout, score in zip(group.rollouts, group.scores or (), strict=True)
                if score.is_correct
            ]
            num_sampled = sum(len(group.rollouts) for group in groups)
            print(f"round {number}: {len(right)} of {num_sampled} responses are right", flush=True)
            for part in range(NUM_STEPS):
                if items := fleet.imitate(right[part::NUM_STEPS]):
                    result = await fleet.train(items)
                    print(f"  loss {result.metrics['loss']:.3f}", flush=True)
            await fleet.free(groups)
            await fleet.publish()
        print(f"after: {await fleet.evaluate()}")
        for problem in fleet.problems:
            print(f"left out: {problem}")


if __name__ == "__main__":
    asyncio.run(main(fa.load_config("configs/tiny_moe_cpu.yaml", ["max_steps=5", *sys.argv[1:]])))
