"""A reward of your own: shorter right answers get a higher score.

    make model
    python examples/own_reward.py [key.path=value ...]

A reward is a function of the task and the response. It returns a float or, as here, a ``Score`` with parts,
which are logged by name (``reward/right`` and ``reward/brevity`` in metrics.jsonl).
"""

import sys

import forgeasync as fa


def right_and_short(task: fa.Task, response: fa.Response) -> fa.Score:
    """Return 1 for a right answer plus up to 0.2 for brevity; the answer is the text after the last ``#``."""
    is_right = response.text.rpartition("#")[2].strip() == task.answer
    brevity = 0.2 / (1 + response.num_tokens / 10) if is_right else 0.0
    return fa.Score(is_right + brevity, is_right, parts={"right": float(is_right), "brevity": brevity})


if __name__ == "__main__":
    overrides = ["max_steps=20", *sys.argv[1:]]
    result = fa.train("configs/tiny_moe_cpu.yaml", overrides, reward=right_and_short)
    for step, brevity in result.metric("reward/brevity"):
        print(f"step {step}: brevity {brevity:.3f}")
    print(f"the trained model is in {result.checkpoint}")
