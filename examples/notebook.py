# A notebook as a script: paste each cell into Jupyter, or open this file in an editor that supports "# %%".
# Run it in the repository's root after `make model`.

# %% A reward that is defined in the notebook
import sys

import forgeasync as fa


def is_even(task: fa.Task, response: fa.Response) -> float:
    digits = [character for character in response.text if character.isdigit()]
    return float(bool(digits) and int(digits[-1]) % 2 == 0)


# %% A run: its output appears below the cell, and interrupting the cell ends the run in order
# YAML files that you give this script as arguments are merged over the first.
files = ["configs/tiny_moe_cpu.yaml", *sys.argv[1:]]
result = fa.train(files, {"algorithm.objective": fa.Cispo(clip_high=2.0)}, reward=is_even)

# %% The run's metrics, as records
rewards = result.metric("reward/mean")
print(f"mean reward: {rewards[0][1]:.2f} at first, {rewards[-1][1]:.2f} at last")
print(f"metrics of the last step: {len(result.metrics[-1])}; checkpoint: {result.checkpoint}")
