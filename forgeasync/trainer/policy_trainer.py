"""One rank of the trainer: model, optimizer and the optimizer step over packed rows.

Every rank of the mesh calls the same methods in the same order; the collectives inside are the only thing
they wait for each other in. No Monarch here: actors and tests alike build this class under an initialized
torch.distributed.

Shape suffixes: L packed row length, T its targets (the response tokens trained on), D model dim, M MoE
layers, K top-k.
"""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.distributed import utils as dist_utils

from forgeasync.algorithms.objectives import Objective
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import LoraSection, OptimizerSection, TrainerSection
from forgeasync.data.routing import NO_RECORD
from forgeasync.trainer import hf_checkpoint, lora_checkpoint
from forgeasync.trainer.head import Targets
from forgeasync.trainer.hf_names import hf_names
from forgeasync.trainer.logprobs import SumRanks
from forgeasync.trainer.model import attention_masks, build_parallel_model
from forgeasync.trainer.packing import PackedRow
from forgeasync.trainer.probe import Probe
from forgeasync.trainer.replay_router import replay, replay_routers
from forgeasync.trainer.step_result import StepResult
from forgeasync.trainer.step_sums import StepSums
from forgeasync.trainer.titan_cpu import DEVICE_TYPE
from forgeasync.weights.named_weight import NamedWeight


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
        lora: LoraSection | None = None,
    ) -> None:
        """Build the model on this rank; without a ``checkpoint`` (Hugging Face folder) it stays random.

        With ``lora`` the model is frozen, and adapters of it are trained, published and saved instead.
        """
        self._section = section
        self._lora = lora
        self._facts = facts
        self._temperature = temperature
        self._objective = objective
        self.policy_version = 0
        self.model, self._parallel_dims = build_parallel_model(
            facts, section, lora=lora, world_size=dist.get_world_size(), seed=seed
        )
        if checkpoint is not None:
            hf_checkpoint.load(self.model, facts, checkpoint)
        self._optimizer = _build_optimizer(self._trained(), section)
        self._routers = replay_routers(self.model)
        self._probe = Probe(section.replay_probe_share)
        batch_mesh = self._parallel_dims.get_optional_mesh("batch")
        # Context-parallel ranks go through the same losses and metrics: they count once.
        self._loss_mesh = batch_mesh
        context_mesh = self._parallel_dims.get_optional_mesh("cp")
        self._context_group = None if context_mesh is None else context_mesh.get_group()
        self._context_rank = 0 if context_mesh is None else context_mesh.get_local_rank()
        self._num_context_ranks = 1 if context_mesh is None else context_mesh.size()
        self.data_rank = 0 if batch_mesh is None else batch_mesh.get_local_rank()
        self.num_data_ranks = 1 if batch_mesh is None else batch_mesh.size()

    def logprobs(self, row: PackedRow, *, replay_routing: bool = True) -> torch.Tensor:
        """Log-probabilities [T] of a row's targets under the current weights; float32, with gradients.

        Over the row's kept sets, and through its recorded experts unless ``replay_routing`` is False.
        """
        with self._replay(row if replay_routing else dataclasses.replace(row, expert_ids_LMK=None)):
            return self._forward(row)

    def _forward(self, row: PackedRow) -> torch.Tensor:
        mine = self._own_part(row)
        positions_BL = torch.from_numpy(row.positions_L)[None].to(DEVICE_TYPE)
        hidden_BLD = self.model(
            torch.from_numpy(row.token_ids_L[mine])[None].to(DEVICE_TYPE),
            positions=positions_BL[:, mine],
            attention_masks=attention_masks(self.model, positions_BL, query_start=mine.start),
        )
        if isinstance(hidden_BLD, DTensor):
            hidden_BLD = hidden_BLD.to_local()
        # Targets of this rank's part: the same tokens counted within the part, and among all targets.
        positions_T = row.mask_L[mine].nonzero()[0]
        first = int(row.mask_L[: mine.start].sum())
        kept = row.kept_tokens.slice(first, first + len(positions_T))
        targets = Targets(
            token_ids_T=torch.from_numpy(row.target_ids_L[mine][positions_T]).to(DEVICE_TYPE),
            kept_offsets=torch.from_numpy(kept.offsets).to(DEVICE_TYPE),
            kept_ids=torch.from_numpy(kept.ids_N).to(DEVICE_TYPE),
        )
        hidden_TD = hidden_BLD[0, torch.from_numpy(positions_T).to(DEVICE_TYPE)]
        logprobs_T = self.model.lm_head(hidden_TD, targets, self._temperature)
        if self._context_group is None:
            return logprobs_T
        # Objectives look at whole sequences: every rank of the row goes on with all of its targets.
        before, after = first, row.num_targets - first - len(positions_T)
        return SumRanks.apply(F.pad(logprobs_T, (before, after)), self._context_group)

    def _own_part(self, row: PackedRow) -> slice:
        """The positions of a row that this rank computes: with context parallelism, an equal part of them."""
        width = len(row.token_ids_L) // self._num_context_ranks
        return slice(self._context_rank * width, (self._context_rank + 1) * width)

    def _replay(self, row: PackedRow) -> AbstractContextManager[None]:
        if row.expert_ids_LMK is not None:
            ids_LMK = row.expert_ids_LMK[self._own_part(row)]
            return replay(self._routers, torch.from_numpy(ids_LMK)[None].to(DEVICE_TYPE))
        if not self._section.compile and self._section.parallel.tensor == 1:
            return nullcontext()
        # A compiled layer keeps to one graph, and tensor-parallel ranks to one order of adding up gradients:
        # without records they replay that there are none.
        mine = self._own_part(row)
        shape = (1, mine.stop - mine.start, len(self._routers), self._facts.top_k)
        return replay(self._routers, torch.full(shape, NO_RECORD, device=DEVICE_TYPE))

    def train_step(self, rows: Sequence[PackedRow], *, num_targets: int) -> StepResult:
        """One optimizer step over this rank's rows (one per microbatch, as many on every rank).

        ``num_targets`` counts the trained positions of all ranks' rows: the loss is the mean over them,
        so that neither packing nor the number of ranks changes the gradient.
        """
        start_s = time.perf_counter()
        sums = StepSums(num_layers=len(self._routers), device=DEVICE_TYPE)
        for row in rows:
            self._accumulate_gradients(row, num_targets, sums)
        learning_rate = self._set_learning_rate()
        grad_norm = dist_utils.clip_grad_norm_(
            [parameter for _, parameter in self._trained()],
            self._section.optimizer.max_grad_norm,
            ep_enabled=self._parallel_dims.ep_enabled,
        )
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.policy_version += 1
        metrics = sums.metrics(num_targets, mesh=self._loss_mesh)
        metrics |= {"grad_norm": float(grad_norm), "learning_rate": learning_rate}
        return StepResult(
            policy_version=self.policy_version,
            num_targets=num_targets,
            num_padding_tokens=sums.num_padding_tokens,
            train_s=time.perf_counter() - start_s,
            metrics=metrics,
        )

    def _accumulate_gradients(self, row: PackedRow, num_targets: int, sums: StepSums) -> None:
        behavior_T = torch.from_numpy(row.behavior_logprobs_L[row.mask_L]).to(DEVICE_TYPE)
        mask_T = torch.ones_like(behavior_T, dtype=torch.bool)
        # The backward pass recomputes checkpointed layers: it has to find the same experts there.
        with self._replay(row):
            logprobs_T = self._forward(row)
            losses_T, objective_sums = self._objective(
                logprobs_T=logprobs_T,
                behavior_logprobs_T=behavior_T,
                advantages_T=torch.from_numpy(row.advantages_L[row.mask_L]).to(DEVICE_TYPE),
                mask_T=mask_T,
                sequence_ids_T=torch.from_numpy(row.sequence_ids_L[row.mask_L]).to(DEVICE_TYPE),
            )
            loss = losses_T.sum() / num_targets
            if row.expert_ids_LMK is not None:
                sums.add_routing([router.replay_counts for router in self._routers])
            loss.backward()
        sums.add({"loss": loss.detach() * num_targets, **objective_sums})
        sums.add_mismatch(logprobs_T.detach(), behavior_T, row)
        sums.add_coverage(row)
        if self._probe.is_due():
            with torch.no_grad():
                unreplayed_T = self.logprobs(row, replay_routing=False)
            sums.add_probe("with_replay", logprobs_T.detach() - behavior_T)
            sums.add_probe("without_replay", unreplayed_T - behavior_T)

    def _set_learning_rate(self) -> float:
        learning_rate = scheduled_learning_rate(self._section.optimizer, self.policy_version + 1)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def named_weights(self) -> list[NamedWeight]:
        """This rank's shards of what is trained, under Hugging Face names (of adapters: peft's).

        The tied head is left out, as in the files.
        """
        return [
            NamedWeight(names=tuple(hf_names(name, self._facts)), tensor=parameter)
            for name, parameter in self._trained()
        ]

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def save_hf(self, folder: Path, *, source: Path) -> None:
        """Write a Hugging Face folder (collective); config and tokenizer are copied from ``source``.

        With adapters it is a peft folder instead, of the adapters of the model at ``source``.
        """
        if self._lora is None:
            hf_checkpoint.save(self.model, self._facts, folder, source=source)
        else:
            lora_checkpoint.save(self.model, self._facts, self._lora, folder, source=source)


def scheduled_learning_rate(optimizer: OptimizerSection, step: int) -> float:
    """The learning rate of a step, counted from 1: linear warm-up, constant, linear decay to zero."""
    factor = min(1.0, step / max(1, optimizer.warmup_steps))
    if optimizer.decay_steps is not None:
        start, end = optimizer.decay_steps
        factor *= min(1.0, max(0.0, (end - step) / (end - start)))
    return optimizer.learning_rate * factor


def _build_optimizer(
    trained: Sequence[tuple[str, torch.nn.Parameter]], section: TrainerSection
) -> torch.optim.AdamW:
    # AdamW's fused loops cannot mix device meshes: experts (sharded over the expert mesh) and the rest
    # (sharded over the data mesh) are groups of their own.
    by_mesh: dict[object, list[torch.nn.Parameter]] = {}
    for _, parameter in trained:
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
