"""Checkpoint folders: names, the controller's state, rules for resuming, and sizes.

    step-00000040/trainer/    model, optimizer and random state, by torch.distributed.checkpoint
    step-00000040/run.json    state of the controller (``RunState``)
    step-00000060.tmp/        being written, or left behind by a run that died while writing
    final/, last/             an exported model

A folder is renamed last, after all of its files and folders were flushed to disk, so a folder without
``.tmp`` is complete.

A resumed run must keep the parts of the config that determine its past: the data and their order, random
seeds, the model's shape and its adapters. Everything else may change: rewards, parallel layout and dtypes,
learning rate and schedule, the loss, batch sizes, age limits and buffer, generators, max_steps.
"""

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forgeasync.buffer import BufferSnapshot, CheckpointedBuffer, LedgerPosition
from forgeasync.config import EXPERT_TARGETS, ModelFacts, RunConfig, num_averages
from forgeasync.files import publish_folder
from forgeasync.models import expected_shapes, num_adapter_parameters, version_bytes
from forgeasync.schema import Problem

TRAINER_FOLDER = "trainer"
RUN_FILE = "run.json"
UNFINISHED_SUFFIX = ".tmp"

FINAL = "final"
"""Name of the folder with the exported model of a run that has made all of its steps."""
LAST = "last"
"""Name of the folder with the newest weights of a run that ended before its last step."""
LAST_PUBLISHED = "last-published"
"""Name of the folder that becomes ``LAST`` if the trainer cannot write ``LAST``."""

_NAME = re.compile(r"step-(\d{8,})")


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written. Its files are removed, and another checkpoint can be begun."""


class CheckpointLost(CheckpointNotWritten):
    """The trainer was lost while it wrote a checkpoint, and no other trainer can write that one."""


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint folder of a step."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder; None if it is not such a name."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def is_whole(folder: Path) -> bool:
    """Whether a folder has all files of a checkpoint. ``run.json`` is written last."""
    return (folder / RUN_FILE).is_file()


def list_checkpoints(parent: Path) -> list[Path]:
    """Return the complete checkpoints in a folder by ascending step; none if the folder does not exist."""
    if not parent.is_dir():
        return []
    steps = {folder: step_of(folder) for folder in parent.iterdir() if is_whole(folder)}
    found = [(step, folder) for folder, step in steps.items() if step is not None]
    return [folder for _, folder in sorted(found)]


def sweep_partial(parent: Path) -> list[str]:
    """Remove incomplete checkpoints that dead runs left; return their names."""
    partial = sorted(parent.glob(f"step-*{UNFINISHED_SUFFIX}"))
    for folder in partial:
        shutil.rmtree(folder)
    return [folder.name for folder in partial]


def partial_folder(folder: Path) -> Path:
    """Return the folder of a checkpoint while it is being written."""
    return folder.with_name(folder.name + UNFINISHED_SUFFIX)


def remove_partial(folder: Path) -> None:
    """Remove the partial folder of a checkpoint whose writing was abandoned."""
    shutil.rmtree(partial_folder(folder), ignore_errors=True)


def publish(folder: Path, run_state: bytes) -> None:
    """Write and flush the controller's state of a checkpoint, and give the folder its final name.

    The checkpoint's other files must be flushed already.
    """
    partial = partial_folder(folder)
    (partial / RUN_FILE).write_bytes(run_state)
    publish_folder(partial, folder)


def prune(parent: Path, *, keep: int) -> None:
    """Remove all checkpoints in a folder except the newest ``keep``."""
    for folder in list_checkpoints(parent)[:-keep]:
        # Renamed first, because an interrupted removal must not leave a folder that looks complete.
        partial = partial_folder(folder)
        folder.rename(partial)
        shutil.rmtree(partial)


FLOAT32_BYTES = 4

EXPORT_OVERHEAD_BYTES = 1024
"""Generous bound on the bytes of one exported tensor's name in header and index."""

OVERHEAD_BYTES = 8192
"""Generous bound on the overhead of one tensor in bytes: names, headers, step counts of the optimizer."""


def bytes_per_parameter(config: RunConfig) -> int:
    """Bytes of a trained parameter in a checkpoint or a snapshot: with AdamW's moments and its average."""
    return (3 + num_averages(config.teachers)) * FLOAT32_BYTES


def checkpoint_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the estimated size of a checkpoint on disk in bytes, rather too large than too small."""
    return state_bytes(config, facts) + OVERHEAD_BYTES * len(expected_shapes(facts))


def state_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the bytes of the arrays of a checkpoint: everything that is trained, with AdamW's moments."""
    return bytes_per_parameter(config) * num_trained(config, facts)


def num_trained(config: RunConfig, facts: ModelFacts) -> int:
    """Return the number of trained parameters: all of the model's, or those of the adapters."""
    if config.lora is not None:
        return num_adapter_parameters(facts, config.lora)
    return sum(math.prod(shape) for shape in expected_shapes(facts).values())


def export_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return the estimated size of the exported float32 model in bytes, rather too large than too small."""
    shapes = expected_shapes(facts)
    overhead = EXPORT_OVERHEAD_BYTES * len(shapes)
    if config.lora is None:
        return FLOAT32_BYTES * sum(math.prod(shape) for shape in shapes.values()) + overhead
    # The adapters of experts are exported for all three projections.
    targets = set(config.lora.targets)
    if targets & set(EXPERT_TARGETS):
        targets |= set(EXPERT_TARGETS)
    whole = config.lora.model_copy(update={"targets": tuple(targets)})
    return FLOAT32_BYTES * num_adapter_parameters(facts, whole) + overhead


def archive_bytes(config: RunConfig, facts: ModelFacts, folder: Path) -> int:
    """Return the bytes that ``folder`` still lacks for the whole versions of ``weights.archive``.

    This is a lower bound, because patches are not counted. A version with which a file begins is complete
    before the oldest file is removed, so there can be ``checkpoint.keep`` + 2.
    """
    if not config.weights.archive:
        return 0
    every, num_files = config.checkpoint.every_steps, 1
    if every is not None:
        num_files = min(config.checkpoint.keep + 2, config.max_steps // every + (every > 1))
    whole = num_files * (1 + num_averages(config.teachers)) * version_bytes(config, facts)
    return max(0, whole - sum(file.stat().st_size for file in folder.glob("*.weights")))


def check_room(config: RunConfig, facts: ModelFacts, *, checkpoints: Path, export: Path) -> Iterator[Problem]:
    """Check that the disks have room for the exported model, and the checkpoints and archived versions that
    exist at one time.

    A checkpoint is complete before the oldest one is removed, so there can be ``checkpoint.keep`` + 1.

    Args:
        config: The run's config.
        facts: Facts of the model.
        checkpoints: Folder of checkpoints. Existing ones count as part of the number.
        export: Folder of the exported model, beside the archive's.
    """
    one = checkpoint_bytes(config, facts)
    num_more = 0
    if config.checkpoint.every_steps is not None:
        # Rounded up, because the last step has a checkpoint too.
        num_ever = math.ceil(config.max_steps / config.checkpoint.every_steps)
        num_left = min(config.checkpoint.keep + 1, num_ever) - len(list_checkpoints(checkpoints))
        num_more = max(1, num_left)
    exported = export_bytes(config, facts)
    archived = archive_bytes(config, facts, export.with_name("versions"))
    at_export, at_checkpoints = existing_folder(export), existing_folder(checkpoints)
    is_shared = at_export.stat().st_dev == at_checkpoints.stat().st_dev
    free = shutil.disk_usage(at_export).free
    needed = exported + archived + (num_more * one if is_shared else 0)
    if needed > free:
        and_others = f", whole versions of weights.archive {_gib(archived)} GiB" if archived else ""
        if is_shared and num_more:
            and_others += f" and {num_more} checkpoints {_gib(num_more * one)} GiB"
        yield Problem(
            field="run_dir",
            value=config.run_dir,
            remedy=f"the trained model takes {_gib(exported)} GiB{and_others}, and {at_export} has "
            f"{_gib(free)} GiB free; make room, name another folder, or keep fewer checkpoints "
            "(checkpoint.keep, checkpoint.every_steps)",
        )
    free = shutil.disk_usage(at_checkpoints).free
    if not is_shared and num_more * one > free:
        yield Problem(
            field="checkpoint.folder",
            value=str(checkpoints),
            remedy=f"{num_more} checkpoints take {_gib(num_more * one)} GiB and {at_checkpoints} has "
            f"{_gib(free)} GiB free; make room, name another folder or keep fewer (checkpoint.keep)",
        )


def existing_folder(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"


UNCHANGEABLE = {
    "seed": "the order of the data and all random draws follow from it",
    "data": "the place in the data's order would mean other problems",
    "lora": "the checkpoint holds what this setting trains",
}
"""Sections and fields that a resumed run has to keep, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of the controller in a checkpoint."""

    step: int
    """Number of steps made, which is also the policy version."""
    elapsed_s: float
    model: dict[str, object]
    """Shape of the model (``model_shape``)."""
    config: dict[str, object]
    problems: str
    """Digest of the training problems in their order."""
    buffer: BufferSnapshot
    ledger: LedgerPosition
    """Position up to which the run's ledger belongs to the checkpoint and is on disk."""

    def encode(self) -> bytes:
        """Encode the state as the text of ``run.json``."""
        return msgspec.json.format(msgspec.json.encode(self))

    @property
    def checkpointed_buffer(self) -> CheckpointedBuffer:
        return CheckpointedBuffer(snapshot=self.buffer, ledger=self.ledger)


def model_shape(facts: ModelFacts) -> dict[str, object]:
    """Return a model's facts as JSON values, as they are read from ``run.json``."""
    return msgspec.json.decode(msgspec.json.encode(facts))


def read_run_state(folder: Path) -> RunState:
    """Read the controller's state from the checkpoint in ``folder``.

    Raises:
        ValueError: The file is damaged, or of another version of this package.
    """
    try:
        return msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=RunState)
    except msgspec.MsgspecError as error:
        raise ValueError(f"--resume: {folder / RUN_FILE} cannot be read: {error}") from None


def check_resumable(state: RunState, folder: Path, config: RunConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Check that a run with this config and model can be resumed from the checkpoint in ``folder``."""
    for field, saved, now in differences(state.model, model_shape(facts)):
        yield Problem(
            field="--resume",
            value=str(folder),
            remedy=f"is a checkpoint of another model: {field} is {saved} there, {now} at "
            f"model.path = {config.model.path!r}",
        )
    current = config.model_dump(mode="json")
    for field, reason in UNCHANGEABLE.items():
        before, after = state.config.get(field), current[field]
        if field == "data":
            before, after = data_order(before), data_order(after)
        for path, saved, now in differences({field: before}, {field: after}):
            yield Problem(field=path, value=now, remedy=f"must be {saved!r} as in {folder}: {reason}")
    if config.max_steps < state.step:
        yield Problem(
            field="max_steps",
            value=config.max_steps,
            remedy=f"must be at least {state.step}, the steps that {folder} has made",
        )


def check_problems(state: RunState, folder: Path, problems: str) -> Iterator[Problem]:
    """Check that the digest of the training problems is the one in the checkpoint.

    The config alone is not enough, because a file of the same name can have new content.
    """
    if state.problems != problems:
        remedy = f"has changed: the source must have {state.problems}, as in {folder}"
        yield Problem(field="data", value=problems, remedy=f"{remedy}: {UNCHANGEABLE['data']}")


_NOT_ORDER = frozenset({"reward", "renderer"})
"""Keys of the section ``data`` that may change on resuming, because they do not affect the data's order."""


def data_order(data: object) -> object:
    """Return the part of the section ``data`` that determines the order of the data."""
    if isinstance(data, Mapping):
        return {key: data_order(value) for key, value in data.items() if key not in _NOT_ORDER}
    return [data_order(one) for one in data] if isinstance(data, list) else data


def differences(
    saved: Mapping[str, object], now: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield the dotted name of each value that differs, with both values. Mappings are compared by key."""
    for key in sorted(saved.keys() | now.keys()):
        one, other = saved.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}", one, other
