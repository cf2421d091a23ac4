"""One rank of the trainer: model, optimizer and the optimizer step over packed rows.

Every rank of the mesh calls the same methods in the same order; the collectives inside are the only thing
they wait for each other in. No Monarch here: actors and tests alike build this class under an initialized
torch.distributed.

Shape suffixes: L packed row length, V vocabulary.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.distributed import utils as dist_utils

from forgeasync.algorithms.objectives import Objective
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import OptimizerSection, TrainerSection
from forgeasync.trainer import hf_checkpoint
from forgeasync.trainer.hf_names import hf_names
from forgeasync.trainer.logprobs import token_logprobs
from forgeasync.trainer.model import attention_masks, build_parallel_model
from forgeasync.trainer.packing import PackedRow
from forgeasync.trainer.step_result import StepResult
from forgeasync.trainer.titan_cpu import DEVICE_TYPE
from forgeasync.weights.buckets import NamedWeight


class PolicyTrainer:
    """Trains a policy; ``policy_version`` counts its optimizer steps."""

    def __init__(
        self,
        *,
        section: TrainerSection,
        facts: ModelFacts,
        temperature: float,
        objective: Objective,
        seed: int,
        checkpoint: Path | None,
    ) -> None:
        """Build the model on this rank; without a ``checkpoint`` (Hugging Face folder) it stays random."""
        self._section = section
        self._facts = facts
        self._temperature = temperature
        self._objective = objective
        self.policy_version = 0
        self.model, self._parallel_dims = build_parallel_model(
            facts, section, world_size=dist.get_world_size(), seed=seed
        )
        if checkpoint is not None:
            hf_checkpoint.load(self.model, facts, checkpoint)
        self._optimizer = _build_optimizer(self.model, section)
        batch_mesh = self._parallel_dims.get_optional_mesh("batch")
        self._loss_mesh = self._parallel_dims.get_optional_mesh("loss")
        self.data_rank = 0 if batch_mesh is None else batch_mesh.get_local_rank()
        self.num_data_ranks = 1 if batch_mesh is None else batch_mesh.size()

    def logprobs(self, row: PackedRow) -> torch.Tensor:
        """Log-probabilities [L] of a row's targets under the current weights; float32, with gradients."""
        token_ids_BL = torch.from_numpy(row.token_ids_L)[None].to(DEVICE_TYPE)
        positions_BL = torch.from_numpy(row.positions_L)[None].to(DEVICE_TYPE)
        logits_BLV = self.model(
            token_ids_BL,
            positions=positions_BL,
            attention_masks=attention_masks(self.model, positions_BL),
        )
        if isinstance(logits_BLV, DTensor):
            logits_BLV = logits_BLV.full_tensor()
        targets_L = torch.from_numpy(row.target_ids_L).to(DEVICE_TYPE)
        return token_logprobs(logits_BLV[0], targets_L, self._temperature)

    def train_step(self, rows: Sequence[PackedRow], *, num_targets: int) -> StepResult:
        """One optimizer step over this rank's rows (one per microbatch, as many on every rank).

        ``num_targets`` counts the trained positions of all ranks' rows: the loss is the mean over them,
        so that neither packing nor the number of ranks changes the gradient.
        """
        start_s = time.perf_counter()
        totals: dict[str, torch.Tensor] = {}
        maxima: dict[str, torch.Tensor] = {"mismatch/logprob_abs_max": torch.zeros((), device=DEVICE_TYPE)}
        for row in rows:
            self._accumulate_gradients(row, num_targets, totals, maxima)
        learning_rate = self._set_learning_rate()
        grad_norm = dist_utils.clip_grad_norm_(
            self.model.parameters(),
            self._section.optimizer.max_grad_norm,
            ep_enabled=self._parallel_dims.ep_enabled,
        )
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.policy_version += 1
        num_padding = torch.tensor(float(sum(int((row.sequence_ids_L < 0).sum()) for row in rows)))
        metrics = {name: self._sum(total) for name, total in totals.items()}
        num_fresh = metrics.pop("mismatch/num_fresh")
        metrics = {name: value / num_targets for name, value in metrics.items()}
        if num_fresh:
            metrics["mismatch/fresh_logprob_abs_mean"] *= num_targets / num_fresh
        else:
            # Nothing was sampled under the current weights: there is no such mean.
            del metrics["mismatch/fresh_logprob_abs_mean"]
        metrics |= {name: self._max(value) for name, value in maxima.items()}
        metrics |= {"grad_norm": float(grad_norm), "learning_rate": learning_rate}
        return StepResult(
            policy_version=self.policy_version,
            num_targets=num_targets,
            num_padding_tokens=int(self._sum(num_padding.to(DEVICE_TYPE))),
            train_s=time.perf_counter() - start_s,
            metrics=metrics,
        )

    def _accumulate_gradients(
        self,
        row: PackedRow,
        num_targets: int,
        totals: dict[str, torch.Tensor],
        maxima: dict[str, torch.Tensor],
    ) -> None:
        mask_L = torch.from_numpy(row.mask_L).to(DEVICE_TYPE)
        behavior_L = torch.from_numpy(row.behavior_logprobs_L).to(DEVICE_TYPE)
        logprobs_L = self.logprobs(row)
        losses_L, sums = self._objective(
            logprobs_T=logprobs_L,
            behavior_logprobs_T=behavior_L,
            advantages_T=torch.from_numpy(row.advantages_L).to(DEVICE_TYPE),
            mask_T=mask_L,
            sequence_ids_T=torch.from_numpy(row.sequence_ids_L).to(DEVICE_TYPE),
        )
        loss = torch.where(mask_L, losses_L, 0.0).sum() / num_targets
        loss.backward()
        sums = {"loss": loss.detach() * num_targets, **sums}
        sums |= _mismatch_sums(logprobs_L.detach(), behavior_L, mask_L, row, maxima)
        for name, value in sums.items():
            totals[name] = totals.get(name, torch.zeros((), device=DEVICE_TYPE)) + value

    def _set_learning_rate(self) -> float:
        learning_rate = scheduled_learning_rate(self._section.optimizer, self.policy_version + 1)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def _sum(self, value: torch.Tensor) -> float:
        return dist_utils.dist_sum(value.float(), self._loss_mesh)

    def _max(self, value: torch.Tensor) -> float:
        return dist_utils.dist_max(value.float(), self._loss_mesh)

    def named_weights(self) -> list[NamedWeight]:
        """This rank's shards under their Hugging Face names; the tied head is left out, as in the files."""
        return [
            NamedWeight(names=tuple(hf_names(name, self._facts)), tensor=parameter)
            for name, parameter in self.model.named_parameters()
        ]

    def save_hf(self, folder: Path, *, source: Path) -> None:
        """Write a Hugging Face folder (collective); config and tokenizer are copied from ``source``."""
        hf_checkpoint.save(self.model, self._facts, folder, source=source)


def scheduled_learning_rate(optimizer: OptimizerSection, step: int) -> float:
    """The learning rate of a step, counted from 1: linear warm-up, constant, linear decay to zero."""
    factor = min(1.0, step / max(1, optimizer.warmup_steps))
    if optimizer.decay_steps is not None:
        start, end = optimizer.decay_steps
        factor *= min(1.0, max(0.0, (end - step) / (end - start)))
    return optimizer.learning_rate * factor


def _mismatch_sums(
    logprobs_L: torch.Tensor,
    behavior_L: torch.Tensor,
    mask_L: torch.Tensor,
    row: PackedRow,
    maxima: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """How far the trainer's log-probabilities are from the sampler's.

    KL(behavior || current) by the k3 estimator of Schulman, "Approximating KL Divergence", 2020. Fresh
    tokens were sampled under the very weights that train now: there the difference is numerics alone.
    """
    difference_L = torch.where(mask_L, logprobs_L - behavior_L, 0.0)
    fresh_L = mask_L & (torch.from_numpy(row.ages_L).to(mask_L.device) == 0)
    maxima["mismatch/logprob_abs_max"] = torch.maximum(
        maxima["mismatch/logprob_abs_max"], difference_L.abs().max()
    )
    return {
        "mismatch/logprob_abs_mean": difference_L.abs().sum(),
        "mismatch/kl": torch.where(mask_L, difference_L.exp() - 1.0 - difference_L, 0.0).sum(),
        "mismatch/fresh_logprob_abs_mean": torch.where(fresh_L, difference_L.abs(), 0.0).sum(),
        "mismatch/num_fresh": fresh_L.sum(),
    }


def _build_optimizer(model: torch.nn.Module, section: TrainerSection) -> torch.optim.AdamW:
    # AdamW's fused loops cannot mix device meshes: experts (sharded over the expert mesh) and the rest
    # (sharded over the data mesh) are groups of their own.
    by_mesh: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    optimizer = section.optimizer
    return torch.optim.AdamW(
        [{"params": parameters} for parameters in by_mesh.values()],
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
