"""A loss of your own: a policy gradient whose weight falls off smoothly with the ratio's distance from 1.

    make model
    python examples/own_loss.py [key.path=value ...]

An objective gets the tokens of a packed row (``fa.RowTokens``) and returns a loss for every token, and sums
over the trained tokens, which go into metrics.jsonl as means. Its fields are the ``options`` of the config.
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
