"""A reward of your own: right answers count more the fewer tokens they take.

    make model
    python examples/own_reward.py [key.path=value ...]

The reward is a function of the task and the response. Here it returns a ``Score``, whose parts are logged by
name (``reward/right`` and ``reward/brevity`` in metrics.jsonl); a bare float does as well.
"""

import sys

import forgeasync as fa


def right_and_short(task: fa.Task, response: fa.Response) -> fa.Score:
    """1 for a right answer, and up to 0.2 more for a short one; the answer is what follows the last ``#``."""
    is_right = response.text.rpartition("#")[2].strip() == task.answer
    brevity = 0.2 / (1 + response.num_tokens / 10) if is_right else 0.0
    return fa.Score(is_right + brevity, is_right, parts={"right": float(is_right), "brevity": brevity})


if __name__ == "__main__":
    overrides = ["max_steps=20", *sys.argv[1:]]
    result = fa.train("configs/tiny_moe_cpu.yaml", overrides, reward=right_and_short)
    for step, brevity in result.metric("reward/brevity"):
        print(f"step {step}: brevity {brevity:.3f}")
    print(f"the trained model is in {result.checkpoint}")
