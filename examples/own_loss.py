"""A loss of your own: a policy gradient with a weight that decreases smoothly as the ratio moves away from 1.

    make model
    python examples/own_loss.py [key.path=value ...]

An objective takes the tokens of a packed row (``fa.RowTokens``). It returns a loss for every token, and
metrics as sums over the trained tokens, of which metrics.jsonl has the means. Its fields are its ``options``
in a config.
"""

import sys

import torch

import forgeasync as fa


class SmoothClip(fa.Objective):
    """-sg(ratio * exp(-(log ratio)^2 / (2 width^2))) * A * logprob; sg stops the gradient."""

    width: float = 0.3

    def __call__(self, row: fa.RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_ratios_T = row.log_ratios().detach()
        gates_T = torch.exp(-(log_ratios_T**2) / (2 * self.width**2))
        losses_T = -log_ratios_T.exp() * gates_T * row.advantages_T * row.logprobs_T
        return losses_T, {"objective/gate": gates_T[row.mask_T].sum()}


if __name__ == "__main__":
    result = fa.train("configs/tiny_moe_cpu.yaml", ["max_steps=20", *sys.argv[1:]], objective=SmoothClip)
    for step, gate in result.metric("objective/gate"):
        print(f"step {step}: mean gate {gate:.3f}")
