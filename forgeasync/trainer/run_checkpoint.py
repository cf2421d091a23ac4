"""Checkpoints and snapshots of the trainer: the state from which a run or a restarted trainer continues.

``TrainerState`` has everything that the next step depends on besides its batch, as tensors by name.

Checkpoints are written during training by torch.distributed.checkpoint, for any layout. Every rank copies its
shards to host memory in a thread while the next forward pass runs; the optimizer waits for that copy. A
second thread writes the copies over a separate gloo group, so that its collectives cannot mix with those of
training. Rank 0 then publishes the checkpoint (``forgeasync.checkpoints``).

Snapshots stay in the host's shared memory. A rank has two files and writes them in turn, so that the previous
snapshot stays complete while the next one is written. The files outlive the process. A file is a header of
``HEADER_BYTES``, then the tensors, each at a multiple of ``ALIGNMENT`` bytes. The header has the version, the
layout, a checksum of the body, and a checksum of itself. It is invalidated before the first byte of a new
snapshot is written, and written after the last one. So if the process dies at any point, an incomplete file
has no snapshot, and the rank's other file has the previous one.
"""

import hashlib
import math
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from forgeasync.checkpoints import (
    TRAINER_FOLDER,
    CheckpointNotWritten,
    partial_folder,
    prune,
    publish,
    remove_partial,
)
from forgeasync.models import DEVICE_TYPE
from forgeasync.trainer.host_copies import HostCopies
from forgeasync.trainer.optimizer import WeightAverage
from forgeasync.trainer.step import SpikeRule
from forgeasync.trainer.step_sums import Probe
from forgeasync.trainer.workarounds.checkpoint_reader import SafeFileSystemReader
from forgeasync.weights import DeviceCopies, SharedFile, StartedCopies, local_shard, page_lock

State = dict[str, torch.Tensor]
"""Tensors by their names in a checkpoint."""

RNG = "rng."
"""Prefix of the names of random states. Each rank has its own; other layouts do not use them."""

NORMS = "grad_norms."
"""Prefix of the name of the gradient norms that spikes are compared with; only with ``on_spike``.

The size of the window follows it.
"""

_OPTIONAL = (RNG, NORMS)


def training_state(model: torch.nn.Module, optimizer: torch.optim.AdamW) -> State:
    """Return trained parameters, their moments and persistent buffers; they share the trainer's memory."""
    state: State = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state[f"model.{name}"] = parameter.detach()
            for key, tensor in _moments(optimizer, parameter).items():
                state[f"optimizer.{name}.{key}"] = tensor
    persistent = model.state_dict().keys()
    state |= {f"model.{name}": buffer for name, buffer in model.named_buffers() if name in persistent}
    return state


def _moments(optimizer: torch.optim.AdamW, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return a parameter's moments. Before the first step, create those that AdamW would create in it."""
    moments = optimizer.state[parameter]
    if not moments:
        # With ``fused`` AdamW keeps it on the parameter's device.
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        moments["step"] = local.new_zeros((), dtype=torch.float32)
        moments["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        moments["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return moments


def random_state() -> State:
    """Return the random state of this rank."""
    prefix = f"{RNG}{dist.get_world_size()}.{dist.get_rank()}"
    state = {f"{prefix}.cpu": torch.get_rng_state()}
    if DEVICE_TYPE != "cpu":
        state[f"{prefix}.{DEVICE_TYPE}"] = torch.get_device_module(DEVICE_TYPE).get_rng_state()
    return state


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Restore the states of ``random_state``; devices that are missing in ``state`` keep theirs."""
    for name, tensor in state.items():
        device = name.rpartition(".")[2]
        if device == "cpu":
            torch.set_rng_state(tensor)
        else:
            torch.get_device_module(device).set_rng_state(tensor)


def load(state: State, folder: Path) -> None:
    """Fill the tensors of ``state`` from a checkpoint written by any number of ranks; collective.

    Random states and norms that the checkpoint does not have are removed from ``state``.

    Raises:
        ValueError: The checkpoint is of another model or of other adapters (the message names a tensor and
            both shapes), or its metadata is damaged or refers to code (the message names the file). No such
            code is run.
    """
    reader = SafeFileSystemReader(folder / TRAINER_FOLDER)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except ValueError as error:
        raise ValueError(f"--resume: {error}") from error
    for name in [name for name in state if name.startswith(_OPTIONAL) and name not in saved]:
        del state[name]
    problem = _difference(state, saved)
    if problem is not None:
        raise ValueError(
            f"--resume: {folder} is a checkpoint of another model or of other adapters: {problem}"
        )
    try:
        dcp.load(state, storage_reader=reader)
    except CheckpointException as error:
        raise ValueError(f"--resume: {folder} cannot be read: {_first_failure(error)}") from error


def _first_failure(error: CheckpointException) -> BaseException:
    """Return the failure of one rank.

    DCP's own exception is not an ``Exception`` and would end an actor's process.
    """
    return next(iter(error.failures.values()))[0]


def _difference(state: Mapping[str, torch.Tensor], saved: Mapping[str, object]) -> str | None:
    saved_names = {name for name in saved if not name.startswith(_OPTIONAL)}
    for name in sorted(saved_names - state.keys()):
        return f"it has {name!r}, the run has no such tensor"
    for name, tensor in state.items():
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            return f"it lacks {name!r}"
        if entry.size != tensor.shape:
            return f"{name!r} has shape {tuple(entry.size)} there and {tuple(tensor.shape)} in the run"
    return None


class TrainerState:
    """State of one rank. Its ``policy_version`` is also the position in the learning rate schedule."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.AdamW,
        average: WeightAverage,
        *,
        probe: Probe,
        spikes: SpikeRule | None,
    ) -> None:
        self.policy_version = 0
        self._model = model
        self._optimizer = optimizer
        self._probe = probe
        self._spikes = spikes
        self._average = average

    def tensors(self) -> State:
        """Return the current state; parameters and moments share the trainer's memory."""
        state = {
            **training_state(self._model, self._optimizer),
            **self._average.tensors(),
            **random_state(),
            "policy_version": torch.tensor(self.policy_version),
            "probe_owed": torch.tensor(self._probe.owed, dtype=torch.float64),
        }
        if self._spikes is not None:
            # Every norm is more than 0: zeros mark unused places.
            norms = torch.zeros(self._spikes.window, dtype=torch.float64)
            norms[: len(self._spikes.norms)] = torch.tensor(self._spikes.norms, dtype=torch.float64)
            state[f"{NORMS}{self._spikes.window}"] = norms
        return state

    def take_over(self, state: State) -> None:
        """Restore the parts of a state that do not share the trainer's memory."""
        self.policy_version = int(state["policy_version"])
        self._probe.owed = float(state["probe_owed"])
        set_random_state({name: tensor for name, tensor in state.items() if name.startswith(RNG)})
        if self._spikes is not None:
            norms = state.get(f"{NORMS}{self._spikes.window}", torch.empty(0)).tolist()
            self._spikes.take_over([norm for norm in norms if norm > 0.0])

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, which may be of another parallel layout; collective.

        Raises:
            ValueError: It is a checkpoint of another model or of other adapters.
        """
        state = self.tensors()
        load(state, folder)
        self.take_over(state)


class CheckpointWriter:
    """Writes checkpoints of one rank, one at a time; every rank calls the same methods in the same order."""

    def __init__(self, open_storage: Callable[[Path], dcp.StorageWriter] = dcp.FileSystemWriter) -> None:
        """``open_storage`` makes DCP's writer for a folder; the default one flushes every file."""
        self._open_storage = open_storage
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-copy")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-write")
        self._copies = HostCopies()
        self._group: dist.ProcessGroup | None = None
        self._staged: Future[State] | None = None
        self._written: Future[None] | None = None

    def begin(self, state: State, folder: Path, *, run_state: bytes, keep: int) -> None:
        """Start to write ``state``; collective. Waits until the previous checkpoint is written.

        Nothing may change the tensors before ``until_staged`` has returned.
        """
        self.finish()
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        self._staged = self._copying.submit(self._copies.copy, state, self._copies.now())
        self._written = self._writing.submit(self._write, self._staged, folder, run_state, keep)

    def _write(self, staged: Future[State], folder: Path, run_state: bytes, keep: int) -> None:
        storage = self._open_storage(partial_folder(folder) / TRAINER_FOLDER)
        try:
            dcp.save(staged.result(), storage_writer=storage, process_group=self._group)
        except CheckpointException as error:
            # Every rank has stopped writing. The disk space may be needed.
            if dist.get_rank() == 0:
                remove_partial(folder)
            raise CheckpointNotWritten(
                f"checkpoint {folder} could not be written: {_first_failure(error)}"
            ) from error
        # Here rank 0 knows that every rank has written its files.
        if dist.get_rank() == 0:
            try:
                publish(folder, run_state)
            except OSError as error:
                remove_partial(folder)
                raise CheckpointNotWritten(f"checkpoint {folder} could not be written: {error}") from error
            prune(folder.parent, keep=keep)

    def until_staged(self) -> None:
        """Wait until the tensors may change again."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    @property
    def is_writing(self) -> bool:
        """Whether the last checkpoint is still being written; safe to call from any thread."""
        written = self._written
        return written is not None and not written.done()

    def finish(self) -> None:
        """Wait until the checkpoint is written.

        Raises:
            CheckpointNotWritten: It could not be written. Raised once, on every rank or only on rank 0.
        """
        self._staged = None
        if self._written is not None:
            written, self._written = self._written, None
            written.result()


NUM_SLOTS = 2
HEADER_BYTES = 4096
"""Size of a snapshot file's header in bytes."""
ALIGNMENT = 64
_MAGIC = b"forgesnp"
_FIELDS = struct.Struct("<8sqQQ16s")
"""Magic, version, bytes of the body, checksum of the body, digest of the layout."""
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Place of one tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLayout:
    """Places of all tensors of a rank, in order."""

    parts: tuple[Part, ...]
    num_bytes: int
    """Size of a file."""

    @property
    def digest(self) -> bytes:
        """16 bytes that depend on all names, dtypes, shapes and offsets."""
        text = repr([(part.name, str(part.dtype), part.shape, part.offset) for part in self.parts])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def lay_out(named: Sequence[tuple[str, torch.Tensor]]) -> SnapshotLayout:
    """Assign a place to every tensor (a rank's own shard), in the given order."""
    parts, offset = [], HEADER_BYTES
    for name, tensor in named:
        part = Part(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=offset)
        parts.append(part)
        offset += -(-part.num_bytes // ALIGNMENT) * ALIGNMENT
    return SnapshotLayout(parts=tuple(parts), num_bytes=offset)


def body_checksum(memory: memoryview) -> int:
    """Return the xxh3 checksum (64 bits) of everything after the header."""
    return xxhash.xxh3_64_intdigest(memory[HEADER_BYTES:])


def invalidate(memory: memoryview) -> None:
    """Mark a file as having no snapshot. Call it before its body is changed."""
    memory[: len(_MAGIC)] = bytes(len(_MAGIC))


def finish(memory: memoryview, *, version: int, digest: bytes) -> None:
    """Write the header after the body is complete: the file then has a snapshot of ``version``."""
    fields = _FIELDS.pack(_MAGIC, version, len(memory) - HEADER_BYTES, body_checksum(memory), digest)
    header = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    memory[: len(header)] = header


def read_version(memory: memoryview, *, digest: bytes) -> int | None:
    """Return the version of the snapshot in a file; None if it has no complete snapshot of this layout."""
    if len(memory) < HEADER_BYTES:
        return None
    fields = bytes(memory[: _FIELDS.size])
    (own,) = _CHECKSUM.unpack_from(memory, _FIELDS.size)
    magic, version, num_bytes, checksum, found = _FIELDS.unpack(fields)
    if magic != _MAGIC or own != xxhash.xxh3_64_intdigest(fields):
        return None
    if found != digest or num_bytes != len(memory) - HEADER_BYTES or checksum != body_checksum(memory):
        return None
    return int(version)


def slot_of(version: int, *, every_steps: int) -> int:
    """Return which of the two files a version is written to; versions are multiples of ``every_steps``."""
    return version // every_steps % 2


def newest_common(versions_by_rank: Sequence[Collection[int]], *, at_most: int) -> int | None:
    """Return the newest version, not after ``at_most``, of which every rank has a complete snapshot."""
    common = set.intersection(*map(set, versions_by_rank))
    return max((version for version in common if version <= at_most), default=None)


def local_parts(state: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return this rank's own part of every tensor, by name; the parts share memory."""
    return [(name, local_shard(tensor).detach()) for name, tensor in state.items()]


def snapshot_bytes(state: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of shared memory that the snapshots of this rank use."""
    return NUM_SLOTS * lay_out(local_parts(state)).num_bytes


class Snapshots:
    """Writes and reads the two snapshot files of this rank."""

    def __init__(self, folder: Path, state: State, *, every_steps: int) -> None:
        """Create the files in ``folder`` of this host, or open those of an earlier process.

        Snapshots are taken of versions that ``every_steps`` divides. ``state`` has the tensors of a snapshot.

        Raises:
            ValueError: The host does not have enough shared memory left.
        """
        self._every_steps = every_steps
        self._layout = lay_out(local_parts(state))
        self._digest = self._layout.digest
        paths = [folder / f"snapshot-{dist.get_rank()}-{slot}" for slot in range(NUM_SLOTS)]
        self._files = [
            SharedFile(path, self._layout.num_bytes, is_new=not path.exists(), reserve=True) for path in paths
        ]
        for file in self._files:
            page_lock(file.bytes)
        self._copies = DeviceCopies()
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._written: Future[None] | None = None
        self.newest: int | None = None
        """Version of the newest complete snapshot that this process wrote or continued from."""

    @torch.no_grad()
    def restore(self, state: State, *, at_most: int) -> int | None:
        """Fill ``state`` from the newest snapshot that all ranks have, not after ``at_most``; collective.

        Returns its version. If there is none, returns None and leaves ``state`` unchanged.
        """
        found = {
            version: file
            for file in self._files
            if (version := read_version(file.memory, digest=self._digest)) is not None
        }
        by_rank: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, sorted(found))
        version = newest_common(by_rank, at_most=at_most)
        if version is not None:
            for part, (_, tensor) in zip(self._layout.parts, local_parts(state), strict=True):
                tensor.copy_(_stored(found[version], part))
            self.newest = version
        return version

    @torch.no_grad()
    def roll_back(self, state: State) -> None:
        """Fill ``state`` from this rank's newest snapshot, which is complete.

        Raises:
            RuntimeError: The memory has changed since it was written.
        """
        assert self.newest is not None, "there is one"
        file = self._files[slot_of(self.newest, every_steps=self._every_steps)]
        found = read_version(file.memory, digest=self._digest)
        if found != self.newest:
            raise RuntimeError(f"the snapshot of version {self.newest} is damaged: its checksum is wrong")
        for part, (_, tensor) in zip(self._layout.parts, local_parts(state), strict=True):
            tensor.copy_(_stored(file, part))

    def begin_if_due(self, version: int, state: State) -> None:
        """Begin to write a snapshot if this version is due. Call it in the training thread.

        The tensors must not change before ``until_written`` has returned.
        """
        if version % self._every_steps:
            return
        self.until_written()
        file = self._files[slot_of(version, every_steps=self._every_steps)]
        targets = [_stored(file, part) for part in self._layout.parts]
        sources = [tensor for _, tensor in local_parts(state)]
        # If the process is killed after this line, the other file still has its snapshot.
        invalidate(file.memory)
        self._written = self._writing.submit(
            self._write, version, file, targets, sources, self._copies.start(targets, sources)
        )

    @torch.no_grad()
    def _write(
        self,
        version: int,
        file: SharedFile,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        copies: StartedCopies | None,
    ) -> None:
        for target, source in zip(targets, sources, strict=True):
            if source.device.type == "cpu":
                target.copy_(source)
        if copies is not None:
            copies.wait()
        finish(file.memory, version=version, digest=self._digest)
        self.newest = version

    def until_written(self) -> float:
        """Wait until the snapshot in progress is complete; return the seconds waited or raise its error."""
        start_s = time.perf_counter()
        if self._written is not None:
            self._written.result()
        return time.perf_counter() - start_s


def _stored(file: SharedFile, part: Part) -> torch.Tensor:
    """Return the tensor at a place in a file."""
    return file.bytes[part.offset : part.offset + part.num_bytes].view(part.dtype).view(part.shape)
