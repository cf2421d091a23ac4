"""The contender of ``trainer_throughput.py``: forgeasync's trainer, on one or more ranks.

Routing replay and kept sets are off, so that both sides compute the same loss.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from throughput_data import BETAS, CLIP_HIGH, CLIP_LOW, EPS, LEARNING_RATE, MAX_GRAD_NORM

from forgeasync.algorithms import Loss, PpoClip
from forgeasync.config import OptimizerSection, ParallelSection, TrainerSection
from forgeasync.models import read_model_facts
from forgeasync.trainer import PolicyTrainer, TrainerSetup, TrainingSequence, pack_rows


class PackedTrainer:
    """One rank of the trainer."""

    def __init__(
        self,
        model: Path,
        sequences: Sequence[TrainingSequence],
        parallel: ParallelSection,
        *,
        compile: bool,
        rank: int,
        port: int,
    ) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=parallel.num_procs)
        # As the trainer actor has it.
        torch.autograd.set_multithreading_enabled(False)
        optimizer = OptimizerSection(
            learning_rate=LEARNING_RATE, betas=BETAS, eps=EPS, max_grad_norm=MAX_GRAD_NORM
        )
        longest = max(sequence.num_tokens for sequence in sequences)
        setup = TrainerSetup(
            section=TrainerSection(
                parallel=parallel,
                tokens_per_row=longest,
                compile=compile,
                replay_probe_share=0.0,
                optimizer=optimizer,
            ),
            facts=read_model_facts(str(model)),
            temperature=1.0,
            loss=Loss(objective=PpoClip(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)),
            seed=0,
            checkpoint=model,
        )
        self._trainer = PolicyTrainer(setup)
        self._sequences = list(sequences)

    def step(self, tokens_per_row: int) -> tuple[float, float]:
        """Pack, and take one optimizer step over all sequences; loss and gradient norm."""
        trainer = self._trainer
        rows = pack_rows(self._sequences, tokens_per_row=tokens_per_row, num_ranks=trainer.num_data_ranks)[
            trainer.data_rank
        ]
        metrics = trainer.train_step(rows).metrics
        return metrics["loss"], metrics["grad_norm"]
