"""The trainer actor: a thin shell around one rank of the policy trainer.

Consumes packed rows from the training loop; produces weight versions in the store. All ranks get every call
at the same time and wait for each other inside its collectives.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint

from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import Dtype, TrainerSection
from forgeasync.observability.logs import redirect_process_output
from forgeasync.trainer.objectives import ObjectiveChoice, build_objective
from forgeasync.trainer.packing import PackedRow
from forgeasync.trainer.step_result import StepResult
from forgeasync.weights import store

if TYPE_CHECKING:
    from forgeasync.trainer.policy_trainer import PolicyTrainer

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


class TrainerActor(Actor):
    """One rank of the trainer mesh."""

    def __init__(self, log_dir: Path) -> None:
        redirect_process_output(log_dir / f"trainer-{current_rank().rank}.log")
        self._trainer: PolicyTrainer | None = None

    @endpoint
    async def setup(
        self,
        section: TrainerSection,
        facts: ModelFacts,
        temperature: float,
        objective: ObjectiveChoice,
        seed: int,
        checkpoint: Path | None,
    ) -> int:
        """Join the process group and build the model; returns the data-parallel rank of this proc."""
        # TorchTitan takes seconds to import: only the procs that train pay for it.
        from forgeasync.trainer.policy_trainer import PolicyTrainer
        from forgeasync.trainer.titan_cpu import DEVICE_TYPE

        backend = "gloo" if DEVICE_TYPE == "cpu" else "cpu:gloo,cuda:nccl"
        if DEVICE_TYPE != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
        # Recomputation in the backward pass needs this thread's mesh context.
        torch.autograd.set_multithreading_enabled(False)
        self._trainer = PolicyTrainer(
            section=section,
            facts=facts,
            temperature=temperature,
            objective=build_objective(objective),
            seed=seed,
            checkpoint=checkpoint,
        )
        return self._trainer.data_rank

    @endpoint
    async def train_step(self, rows: list[PackedRow], num_targets: int) -> StepResult:
        """One optimizer step over this data rank's rows; ``num_targets`` counts those of all ranks."""
        assert self._trainer is not None
        return self._trainer.train_step(rows, num_targets=num_targets)

    @endpoint
    async def publish(self, dtype: Dtype) -> int:
        """Put the current weights into the store, cast to the generators' dtype; returns their version."""
        assert self._trainer is not None
        version = self._trainer.policy_version
        manifest = await store.put_shards(version, self._trainer.named_weights(), TORCH_DTYPES[dtype])
        dist.barrier()
        if dist.get_rank() == 0:
            await store.commit(manifest)
        return version

    @endpoint
    async def save_hf(self, folder: Path, source: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        assert self._trainer is not None
        self._trainer.save_hf(folder, source=source)
