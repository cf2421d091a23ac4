"""Checkpoints of the trainer, by torch.distributed.checkpoint: written during training, for any layout.

``TrainerState`` has everything that the next step depends on besides its batch, as tensors by name. Every
rank copies its shards to host memory in a thread while the next forward pass runs; the optimizer waits for
that copy. A second thread writes the copies over a separate gloo group, so that its collectives cannot mix
with those of training. Rank 0 then publishes the checkpoint (``forgeasync.checkpoints``).
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
