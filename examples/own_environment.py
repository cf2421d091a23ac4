"""An environment of your own with two turns: after a wrong answer, the model gets a second attempt.

    make model
    python examples/own_environment.py [key.path=value ...]

The same class works for training, evaluation and any chat endpoint: it only calls ``agent.respond``.
"""

import sys

import forgeasync as fa


class TryAgain(fa.Environment):
    """Scores 1 for a right first answer and ``second_chance`` for a right second answer."""

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
    """Return whether the text after the last ``#`` is the task's answer."""
    return turn.text.rpartition("#")[2].strip() == task.answer


if __name__ == "__main__":
    # Both attempts must fit in the context.
    overrides = ["max_steps=20", "sampling.max_response_tokens=48", *sys.argv[1:]]
    result = fa.train("configs/tiny_moe_cpu.yaml", overrides, environment=TryAgain)
    for step, turns in result.metric("episode/turns_mean"):
        print(f"step {step}: {turns:.2f} turns")
