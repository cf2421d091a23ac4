"""An environment of your own with two turns: a model whose answer is wrong is told so, and tries again.

    make model
    python examples/own_environment.py [key.path=value ...]

The same class trains, evaluates, and could talk to any chat endpoint: all that it needs is ``agent.respond``.
"""

import sys

import forgeasync as fa


class TryAgain(fa.Environment):
    """Right at once is worth 1, right at the second attempt ``second_chance``."""

    def __init__(self, second_chance: float = 0.5) -> None:
        self.second_chance = second_chance

    async def rollout(self, task: fa.Task, agent: fa.Agent) -> fa.Score:
        messages = [{"role": "user", "content": task.prompt}]
        turn = await agent.respond(messages)
        if is_right(turn, task):
            return fa.Score(1.0, True, parts={"at_once": 1.0})
        messages += [turn.message, {"role": "user", "content": task.prompt}]
        turn = await agent.respond(messages)
        found = is_right(turn, task)
        return fa.Score(self.second_chance * found, found, parts={"at_once": 0.0})


def is_right(turn: fa.Turn, task: fa.Task) -> bool:
    """The answer is what follows the last ``#``."""
    return turn.text.rpartition("#")[2].strip() == task.answer


if __name__ == "__main__":
    # Both attempts have to fit the context.
    overrides = ["max_steps=20", "sampling.max_response_tokens=48", *sys.argv[1:]]
    result = fa.train("configs/tiny_moe_cpu.yaml", overrides, environment=TryAgain)
    for step, turns in result.metric("episode/turns_mean"):
        print(f"step {step}: {turns:.2f} turns")
