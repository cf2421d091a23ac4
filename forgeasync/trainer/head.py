"""The output layer: from hidden states to log-probabilities of given tokens, never to a row of logits.

Shape suffixes: T tokens, K ids of each token, D model dim, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torchtitan.models.common import Linear

from forgeasync.trainer.logprobs import Predictions, chunked_predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Tokens to predict and their kept sets (CSR: int64 ``kept_offsets`` [T + 1], int32 ``kept_ids``)."""

    token_ids_T: torch.Tensor
    kept_offsets: torch.Tensor
    kept_ids: torch.Tensor
    asked_ids_TK: torch.Tensor | None = None
    """int64: ids whose log-probabilities over the full vocabulary are asked for."""


class LogprobHead(Linear):
    """An output layer that is asked for log-probabilities instead of logits.

    A module's own ``forward``, so that FSDP2 gathers and frees its weight as it does for any layer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self, hidden_TD: torch.Tensor, targets: Targets, temperature: float, with_entropies: bool
    ) -> Predictions:
        """Float32 [T] each; ``with_entropies`` False: no entropies."""
        return chunked_predictions(
            hidden_TD,
            self.weight,
            targets.token_ids_T,
            targets.kept_offsets,
            targets.kept_ids,
            temperature,
            with_entropies=with_entropies,
            asked_ids_TK=targets.asked_ids_TK,
        )
