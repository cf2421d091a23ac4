"""The baseline of ``trainer_throughput.py``: a GRPO step as a plain script writes it.

transformers' model, microbatches padded to the longest sequence in them, PyTorch's AdamW. Whatever
transformers picks by itself stays: attention and experts implementation, dtype of the file.

Shape suffixes: B sequences of a microbatch, L the longest of them, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from throughput_data import BETAS, CLIP_HIGH, CLIP_LOW, EPS, LEARNING_RATE, MAX_GRAD_NORM
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from forgeasync.trainer import TrainingSequence


class PaddedTrainer:
    """One process, one model, padded microbatches."""

    def __init__(self, model: Path, sequences: Sequence[TrainingSequence], *, is_sorted: bool) -> None:
        """``is_sorted``: microbatches of sequences of like length, which most scripts do not bother with."""
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0
        )
        order = sorted(sequences, key=lambda sequence: sequence.num_tokens) if is_sorted else sequences
        self._sequences = list(order)
        self._num_targets = sum(len(sequence.response_ids_T) for sequence in sequences)

    def implementations(self) -> str:
        """Name the implementations that transformers has chosen."""
        config = self._model.config
        return f"attention {config._attn_implementation}, experts {config._experts_implementation}"

    def step(self, micro_batch: int) -> tuple[float, float]:
        """One optimizer step over all sequences; loss and gradient norm."""
        total = 0.0
        for start in range(0, len(self._sequences), micro_batch):
            loss = self._loss(self._sequences[start : start + micro_batch])
            loss.backward()
            total += loss.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, float(grad_norm)

    def _loss(self, sequences: Sequence[TrainingSequence]) -> torch.Tensor:
        """The microbatch's share of the clipped surrogate, mean over all response tokens of the batch."""
        ids_BL = _padded([_ids(sequence) for sequence in sequences])
        lengths_B = torch.tensor([sequence.num_tokens for sequence in sequences])
        prompts_B = torch.tensor([len(sequence.prompt_ids_P) for sequence in sequences])
        place_L = torch.arange(ids_BL.shape[1])
        attention_BL = place_L < lengths_B[:, None]
        is_target_BL = (attention_BL & (place_L >= prompts_B[:, None]))[:, 1:]
        behavior_BL = _padded([_behavior(sequence) for sequence in sequences])[:, 1:]
        advantages_B1 = torch.tensor([[sequence.advantage] for sequence in sequences])
        logits_BLV = self._model(input_ids=ids_BL, attention_mask=attention_BL, use_cache=False).logits
        logprobs_BLV = logits_BLV[:, :-1].log_softmax(-1)
        logprobs_BL = logprobs_BLV.gather(-1, ids_BL[:, 1:, None]).squeeze(-1)
        ratio_BL = (logprobs_BL - behavior_BL).exp()
        clipped_BL = ratio_BL.clamp(1.0 - CLIP_LOW, 1.0 + CLIP_HIGH)
        losses_BL = -torch.minimum(ratio_BL * advantages_B1, clipped_BL * advantages_B1)
        return (losses_BL * is_target_BL).sum() / self._num_targets


def _ids(sequence: TrainingSequence) -> np.ndarray:
    return np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T]).astype(np.int64)


def _behavior(sequence: TrainingSequence) -> np.ndarray:
    """Zero at the prompt."""
    return np.pad(sequence.behavior_logprobs_T, (len(sequence.prompt_ids_P), 0))


def _padded(rows: Sequence[np.ndarray]) -> torch.Tensor:
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
