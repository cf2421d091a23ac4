"""What the mesh makes of its ranks' answers."""

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from forgeasync.actors import TrainerActor, TrainerMesh
from forgeasync.config import TimeoutSection
from forgeasync.process_memory import MemoryPeak
from forgeasync.trainer import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Answers a call to one rank."""

    answer: Callable[..., object]

    async def call_one(self, *arguments: object) -> object:
        return self.answer(*arguments)


class Ranks:
    """Trainer ranks in this process, each with a memory of its own."""

    def __init__(self, *memories: MemoryPeak) -> None:
        self._memories = memories

    def slice(self, *, procs: int) -> SimpleNamespace:
        def train(rows: list[int]) -> StepResult:
            return StepResult(
                policy_version=1,
                num_targets=len(rows),
                num_padding_tokens=0,
                train_s=0.0,
                metrics={"loss": 0.5, "payload/num_read_shared": float(procs)},
                skip_reason="a spike",
                not_kept="no room" if procs == 1 else None,
                memory=self._memories[procs],
            )

        return SimpleNamespace(
            setup=Endpoint(answer=lambda setup, host_id: procs), train_rows=Endpoint(answer=train)
        )


def test_rows_that_a_disk_refuses_are_told_with_the_step(tmp_path: Path) -> None:
    (tmp_path / "bad_steps").touch()
    result = StepResult(
        policy_version=3,
        num_targets=1,
        num_padding_tokens=0,
        train_s=0.0,
        metrics={},
        skip_reason="nan",
    )

    def keep(folder: Path | None, result: StepResult) -> StepResult:
        rank = SimpleNamespace(_bad_steps=folder, _rank=1)
        return asyncio.run(TrainerActor._keep_if_bad(rank, result, []))  # type: ignore[arg-type]

    refused = keep(tmp_path / "bad_steps", result).not_kept
    assert refused is not None and refused.startswith("rows of trainer rank 1: ")
    assert keep(tmp_path / "other", result).not_kept is None
    assert [file.name for file in (tmp_path / "other" / "step-00000003").iterdir()] == ["rank-1.npz"]
    keep(tmp_path / "third", dataclasses.replace(result, skip_reason=None))
    keep(None, result)
    assert not (tmp_path / "third").exists()


def test_the_largest_rank_says_how_much_memory_a_step_takes_and_any_what_was_not_kept() -> None:
    ranks = Ranks(MemoryPeak(resident_bytes=3), MemoryPeak(resident_bytes=8, gpu_bytes=2))
    mesh = TrainerMesh(ranks, 2, TimeoutSection())  # type: ignore[arg-type]

    async def step() -> StepResult:
        await mesh.setup(None, host_ids=["a", "a"])  # type: ignore[arg-type]
        return await mesh.train_rows([[], []], step=1)

    result = asyncio.run(step())
    assert result.memory == MemoryPeak(resident_bytes=8, gpu_bytes=2)
    assert result.not_kept == "no room", "of any rank"
    assert result.metrics["payload/num_read_shared"] == 0.0, "all else is the first rank's"
