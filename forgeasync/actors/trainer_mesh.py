"""All ranks of the trainer as one trainer: every call goes to all of them, each gets only its own rows."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from forgeasync.actors.router import GeneratorRouter
from forgeasync.actors.trainer import TrainerActor
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import Dtype, LoraSection, TimeoutSection, TrainerSection
from forgeasync.config.weights_schema import TransportChoice
from forgeasync.data.dtypes import TORCH_DTYPES
from forgeasync.trainer.batch import TrainingItem
from forgeasync.trainer.loss import LossChoice
from forgeasync.trainer.packing import PackedRow
from forgeasync.trainer.step_result import StepResult
from forgeasync.weights.layout import WeightLayout
from forgeasync.weights.manifest import Manifest
from forgeasync.weights.transports.transport import StagingSource


class TrainerMesh:
    """The trainer mesh behind deadlines; a call past one raises TimeoutError."""

    def __init__(self, actors: TrainerActor, num_procs: int, timeouts: TimeoutSection) -> None:
        self._actors = actors
        self._ranks = [actors.slice(procs=rank) for rank in range(num_procs)]
        self._timeouts = timeouts
        self._data_ranks: list[int] = []

    async def setup(
        self,
        *,
        section: TrainerSection,
        facts: ModelFacts,
        temperature: float,
        loss: LossChoice,
        seed: int,
        checkpoint: Path | None,
        lora: LoraSection | None,
        max_token_age: int | None,
        host_ids: Sequence[str],
        resume_from: Path | None,
    ) -> None:
        """Build the model on every rank; with ``resume_from`` it goes on from that checkpoint.

        ``host_ids`` says by rank where each of them is.
        """
        async with asyncio.timeout(self._timeouts.setup_s):
            self._data_ranks = list(
                await asyncio.gather(
                    *(
                        rank.setup.call_one(
                            section,
                            facts,
                            temperature,
                            loss,
                            seed,
                            checkpoint,
                            lora,
                            max_token_age,
                            host_id,
                            resume_from,
                        )
                        for rank, host_id in zip(self._ranks, host_ids, strict=True)
                    )
                )
            )

    @property
    def num_procs(self) -> int:
        return len(self._ranks)

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different rows; the others share theirs (tensor parallelism)."""
        return max(self._data_ranks) + 1

    async def connect(self, generators: GeneratorRouter) -> None:
        """Let every rank read payloads that lie on the generators' hosts."""
        async with asyncio.timeout(self._timeouts.setup_s):
            await self._actors.connect.call(generators.actors)

    async def train_rows(self, rows_by_data_rank: list[list[PackedRow]]) -> StepResult:
        """One optimizer step; as many rows for every data rank."""
        async with asyncio.timeout(self._timeouts.train_step_s):
            results = await asyncio.gather(
                *(
                    rank.train_rows.call_one(rows_by_data_rank[data_rank])
                    for rank, data_rank in zip(self._ranks, self._data_ranks, strict=True)
                )
            )
        return results[0]

    async def train_items(self, rows_by_data_rank: list[list[list[TrainingItem]]]) -> StepResult:
        """The same over rollouts by reference; every rank reads the arrays of its own rows."""
        async with asyncio.timeout(self._timeouts.train_step_s):
            results = await asyncio.gather(
                *(
                    rank.train_items.call_one(rows_by_data_rank[data_rank])
                    for rank, data_rank in zip(self._ranks, self._data_ranks, strict=True)
                )
            )
        return results[0]

    async def lay_out_weights(self, dtype: Dtype) -> WeightLayout:
        """Who publishes what, and where it will lie."""
        async with asyncio.timeout(self._timeouts.setup_s):
            ranks = await asyncio.gather(*(rank.lay_out_weights.call_one(dtype) for rank in self._ranks))
        self._layout = WeightLayout(dtype=TORCH_DTYPES[dtype], ranks=tuple(ranks))
        return self._layout

    async def open_staging(
        self, folders: Sequence[Path], transports: frozenset[TransportChoice]
    ) -> list[StagingSource]:
        """Have every rank allocate its staging buffers in its host's folder; how to reach them, by rank."""
        async with asyncio.timeout(self._timeouts.setup_s):
            return list(
                await asyncio.gather(
                    *(
                        rank.open_staging.call_one(folder, transports)
                        for rank, folder in zip(self._ranks, folders, strict=True)
                    )
                )
            )

    async def stage_weights(self, slot: int) -> Manifest:
        """Copy the current weights into a slot of every rank's staging buffers."""
        async with asyncio.timeout(self._timeouts.weights_s):
            shards = await asyncio.gather(*(rank.stage_weights.call_one(slot) for rank in self._ranks))
        assert len({shard.version for shard in shards}) == 1, "ranks are at different versions"
        return Manifest(
            version=shards[0].version,
            slot=slot,
            layout_digest=self._layout.digest,
            checksums=tuple(shard.checksums for shard in shards),
            copy_s=max(shard.copy_s for shard in shards),
        )

    async def begin_checkpoint(self, folder: Path, *, run_state: bytes, keep: int) -> None:
        """Start to write a checkpoint beside training; waits for the one before."""
        async with asyncio.timeout(self._timeouts.train_step_s):
            await asyncio.gather(
                *(rank.begin_checkpoint.call_one(folder, run_state, keep) for rank in self._ranks)
            )

    async def finish_checkpoint(self) -> None:
        """Wait until the checkpoint begun last is on the disk."""
        async with asyncio.timeout(self._timeouts.train_step_s):
            await asyncio.gather(*(rank.finish_checkpoint.call_one() for rank in self._ranks))

    async def save_hf(self, folder: Path, *, source: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        async with asyncio.timeout(self._timeouts.train_step_s):
            await asyncio.gather(*(rank.save_hf.call_one(folder, source) for rank in self._ranks))
