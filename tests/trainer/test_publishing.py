"""A version that is copied while the next step is under way: it is that of its own step, bit for bit."""

import asyncio
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from forgeasync.config import ParallelSection
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import PolicyTrainer, pack_row
from forgeasync.weights import BLOCK_BYTES, SharedMemoryTransport, SlotWrite, WeightPublisher
from tests.support import lora, trainers
from tests.support.processes import run_ranks
from tests.support.trainers import make_sequences

NOT_LONG_S = 0.3
"""Enough for an optimizer that does not wait."""


def _shards(trainer: PolicyTrainer, publisher: WeightPublisher) -> list[torch.Tensor]:
    weights = trainer.named_weights()
    tensors = [weights[index].tensor.detach() for index in publisher._indices]
    return [trainers.local(tensor).to(torch.float32, copy=True).flatten() for tensor in tensors]


def _train_while_copying(folder: Path, staging: Path, has_adapters: bool) -> None:
    parallel = ParallelSection(num_procs=2, expert=2)
    trainer = (lora if has_adapters else trainers).make_trainer(folder, parallel)
    rank = torch.distributed.get_rank()
    row = pack_row(make_sequences(4, trainer._facts)[2 * trainer.data_rank :][:2])
    publisher = WeightPublisher(trainer.named_weights(), torch.float32, host_id="h")
    own = staging / str(rank)
    own.mkdir(parents=True)
    asyncio.run(publisher.open(own, SharedMemoryTransport(), generator_hosts=frozenset({"h"})))
    trainer.train_step([row])

    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    let_go = threading.Event()
    finish, step = SlotWrite.finish, trainer._optimizer.step

    def held_finish(write: SlotWrite) -> Any:
        let_go.wait()
        events.put("copies")
        return finish(write)

    def noted_step() -> None:
        events.put("steps")
        step()

    at_its_step = _shards(trainer, publisher)
    trainer._optimizer.step = noted_step  # type: ignore[method-assign]
    SlotWrite.finish = held_finish  # type: ignore[method-assign]
    publication = publisher.begin(1, trainer.policy_version, trainer.named_weights())

    def until_copied() -> None:
        events.put("wants to step")
        publication.until_copied()

    trainer.let_read(until_copied)
    order = []

    def watch() -> None:
        # Reached with the copy held: forward and backward pass have not waited for it.
        order.append(events.get())
        try:
            order.append(events.get(timeout=NOT_LONG_S))
        except queue.Empty:
            order.append("waits")
        let_go.set()

    watching = threading.Thread(target=watch)
    watching.start()
    result = trainer.train_step([row])
    watching.join()
    SlotWrite.finish = finish  # type: ignore[method-assign]
    staged = asyncio.run(publication.finished())
    while not events.empty():
        order.append(events.get())
    assert order == ["wants to step", "waits", "copies", "steps"]
    assert result.metrics["time/wait_for_copies_s"] >= NOT_LONG_S
    held = publisher.buffers.bytes(1)
    checksums = [xxhash.xxh3_64_intdigest(block.numpy().data) for block in held.split(BLOCK_BYTES)]
    assert staged.version == 1 and staged.checksums.tolist() == checksums
    found = [
        held[piece.offset :][: piece.num_elements * 4].clone().view(torch.float32)
        for piece in publisher.layout.pieces
    ]
    assert found, "every rank publishes something"
    assert all(map(torch.equal, found, at_its_step))
    assert not any(map(torch.equal, found, _shards(trainer, publisher))), "the step changed every shard"


@pytest.mark.parametrize("has_adapters", [False, True])
def test_the_optimizer_waits_for_the_copies_and_nothing_else_does(tmp_path: Path, has_adapters: bool) -> None:
    run_ranks(2, _train_while_copying, write_tiny_model(tmp_path / "hf"), tmp_path / "staging", has_adapters)
