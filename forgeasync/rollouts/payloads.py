"""Payloads: the arrays of a group, written once where the group was sampled, read once where it trains.

A group is one file in the shared memory of the host where it was sampled, written by the generator that owns
it (``PayloadWriter``). Messages carry a ``PayloadRef`` in place of the bytes. ``PayloadReader`` maps the file
on the same host. ``RemotePayloadReader`` gets a small handle from the owner's ``PayloadServer`` and reads
through Monarch's RDMABuffer, which uses TCP where there is no RDMA hardware.

A writer never changes a file that has its final name, and readers only know final names, so a reader finds a
complete file or none. A reader that has mapped a file keeps its pages even after the file is freed. A file
outlives its writer: if the writer is gone, any generator of the host can serve and free the file.

The rollouts of a group share their prompt, and nearly always its routing record too. Each distinct prompt
with its record is one payload, which the rollouts refer to by index. Routing records differ if weights were
updated between the first steps of two rollouts, or if batching rounded a gate differently. Prompts differ if
an environment begins the episodes of a task differently.

Shape suffixes: P prompt tokens, T response tokens, S = P + T, R recorded tokens, M MoE layers, K top-k.
"""

import asyncio
import errno
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from forgeasync.rollouts.rollout import EVERY_HOST, PayloadRef, Rollout, whole_pages
from forgeasync.rollouts.teacher_record import TeacherRecord, teacher_record
from forgeasync.rollouts.token_records import KeptTokens, RoutedExperts, concatenate_routing

if TYPE_CHECKING:
    # Only transfers between hosts need these, so they are imported there.
    import torch
    from monarch.rdma import RDMABuffer

Arrays = Mapping[str, np.ndarray]
"""Arrays of a payload, by name."""

MAGIC = b"FAPAYLD\n"

FORMAT_VERSION = 1

ALIGNMENT = 64
"""Alignment in bytes of arrays in a payload and of payloads in a file: a cache line, enough for SIMD."""

_HEADER = struct.Struct("<8sQ32sQQ")
"""Header of a payload: magic, format version, payload id, length of the body, xxh3_64 of the body."""

_TABLE_LENGTH = struct.Struct("<Q")
"""Length of the table of arrays in bytes, at the beginning of the body. The table follows."""

_MAX_PAYLOAD_ID_BYTES = 32

assert _HEADER.size == ALIGNMENT


class PayloadNotFound(LookupError):
    """The file of the payload was freed, or never existed."""


class PayloadTorn(ValueError):
    """The bytes of the payload are not those that were written."""


class PayloadStoreFull(MemoryError):
    """A group does not fit into its writer's capacity or into the host's shared memory."""


def _gone(ref: PayloadRef) -> PayloadNotFound:
    return PayloadNotFound(
        f"payload {ref.payload_id}: file is gone on host {ref.host_id}: expected {ref.file}, found nothing "
        "(freed, or never written)"
    )


def _torn(ref: PayloadRef, field: str, *, expected: object, found: object) -> PayloadTorn:
    """Return the error for a payload whose ``field`` is not what its reference says."""
    return PayloadTorn(
        f"payload {ref.payload_id} in {ref.file} of host {ref.host_id}: {field} should be {expected!r} "
        f"but is {found!r}"
    )


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """Entry of the table of arrays. ``offset`` counts bytes from the beginning of the first array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


_ENCODER = msgspec.msgpack.Encoder()

_DECODER = msgspec.msgpack.Decoder(list[_Entry])


def align(position: int) -> int:
    """Round a position in bytes up to a multiple of ``ALIGNMENT``."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def _dtype_name(name: str, dtype: np.dtype) -> str:
    # The string of a structured dtype gives its size only, and extension dtypes such as bfloat16 read back as
    # raw bytes. Neither would survive a round trip.
    if dtype.hasobject or np.dtype(dtype.str) != dtype:
        raise ValueError(
            f"array {name!r} has dtype {dtype!r}, which its name {dtype.str!r} does not describe in full; "
            "a payload holds plain dtypes only"
        )
    return dtype.str


def _plan(arrays: Arrays) -> tuple[bytes, list[int], int]:
    """Return the encoded table, the position of each array in the payload, and the payload's length."""
    entries, end = [], 0
    for name, array in arrays.items():
        offset, dtype = align(end), _dtype_name(name, array.dtype)
        entries.append(_Entry(name=name, dtype=dtype, shape=array.shape, offset=offset))
        end = offset + array.nbytes
    table = _ENCODER.encode(entries)
    start = align(_HEADER.size + _TABLE_LENGTH.size + len(table))
    return table, [start + entry.offset for entry in entries], start + end


def measure(arrays: Arrays) -> int:
    """Return the length in bytes of a payload of these arrays.

    Raises:
        ValueError: An array has a structured, extension or object dtype.
    """
    return _plan(arrays)[2]


def write_into(memory: memoryview, arrays: Arrays, payload_id: str) -> int:
    """Write a payload into the first ``measure(arrays)`` bytes of ``memory``; return the body's checksum.

    Each array is copied once, in C order.

    Raises:
        ValueError: An array has a structured, extension or object dtype.
    """
    table, starts, num_bytes = _plan(arrays)
    encoded_id = payload_id.encode("ascii")
    assert len(encoded_id) <= _MAX_PAYLOAD_ID_BYTES and not encoded_id.endswith(b"\0"), payload_id
    assert len(memory) >= num_bytes, f"{num_bytes} bytes do not fit into {len(memory)}"
    table_start = _HEADER.size + _TABLE_LENGTH.size
    _TABLE_LENGTH.pack_into(memory, _HEADER.size, len(table))
    end = table_start + len(table)
    memory[table_start:end] = table
    for start, array in zip(starts, arrays.values(), strict=True):
        # Zeros the gap between two arrays, because the memory may have been used before.
        memory[end:start] = bytes(start - end)
        np.copyto(np.ndarray(array.shape, array.dtype, buffer=memory, offset=start), array, casting="no")
        end = start + array.nbytes
    memory[end:num_bytes] = bytes(num_bytes - end)
    body = memory[_HEADER.size : num_bytes]
    checksum = xxhash.xxh3_64_intdigest(body)
    _HEADER.pack_into(memory, 0, MAGIC, FORMAT_VERSION, encoded_id, len(body), checksum)
    return checksum


def _check(memory: memoryview, ref: PayloadRef) -> None:
    if len(memory) < ref.num_bytes:
        raise _torn(ref, "length in bytes", expected=ref.num_bytes, found=len(memory))
    magic, version, encoded_id, num_body_bytes, checksum = _HEADER.unpack_from(memory)
    expected_id = ref.payload_id.encode("ascii").ljust(_MAX_PAYLOAD_ID_BYTES, b"\0")
    for field, expected, found in (
        ("magic", MAGIC, magic),
        ("format version", FORMAT_VERSION, version),
        ("payload id", expected_id, encoded_id),
        ("body length", ref.num_bytes - _HEADER.size, num_body_bytes),
        ("checksum in the header", ref.checksum, checksum),
    ):
        if found != expected:
            raise _torn(ref, field, expected=expected, found=found)
    computed = xxhash.xxh3_64_intdigest(memory[_HEADER.size : ref.num_bytes])
    if computed != ref.checksum:
        raise _torn(ref, "checksum of the body", expected=ref.checksum, found=computed)


def read_from(memory: memoryview, ref: PayloadRef, *, copy: bool) -> dict[str, np.ndarray]:
    """Return the arrays of the payload at the beginning of ``memory``, in the order they were written.

    With ``copy``, every array owns its memory. Otherwise the arrays are views, which keep ``memory`` alive
    and are read-only if ``memory`` is.

    Raises:
        PayloadTorn: Length, magic, format version, id or checksum is not what ``ref`` says.
    """
    _check(memory, ref)
    (num_table_bytes,) = _TABLE_LENGTH.unpack_from(memory, _HEADER.size)
    table_start = _HEADER.size + _TABLE_LENGTH.size
    arrays_start = align(table_start + num_table_bytes)
    arrays = {}
    for entry in _DECODER.decode(memory[table_start : table_start + num_table_bytes]):
        view = np.ndarray(
            entry.shape, np.dtype(entry.dtype), buffer=memory, offset=arrays_start + entry.offset
        )
        arrays[entry.name] = view.copy() if copy else view
    return arrays


class PayloadWriter:
    """Writes the payloads of one generator process, and holds them until they are freed. Thread-safe."""

    def __init__(self, folder: Path, host_id: str, capacity_bytes: int) -> None:
        """Write into ``folder`` of this host, at most ``capacity_bytes`` for all files together."""
        assert folder.is_dir(), f"{folder} is not a folder"
        self._folder = folder
        self._host_id = host_id
        self._capacity_bytes = capacity_bytes
        # Makes file names unique in the folder, which several writers share, and payload ids in the run.
        self._token = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._num_groups = 0
        self._num_bytes_held = 0
        self._num_bytes_by_file: dict[str, int] = {}

    @property
    def num_bytes_held(self) -> int:
        """Bytes of memory that the files take, including files that are being written."""
        return self._num_bytes_held

    def write_group(self, payloads: Sequence[Arrays]) -> list[PayloadRef]:
        """Write a group's payloads into one new file; return their references, in the same order.

        Raises:
            PayloadStoreFull: The group does not fit into the capacity, or the host's shared memory is full.
            ValueError: An array has a dtype that a payload cannot hold.
        """
        assert payloads, "a group without payloads"
        lengths = [measure(arrays) for arrays in payloads]
        num_file_bytes = sum(map(align, lengths[:-1])) + lengths[-1]
        num_bytes_held = whole_pages(num_file_bytes)
        file = self._reserve(num_bytes_held)
        try:
            refs = self._write_file(file, num_file_bytes, payloads, lengths)
        except BaseException:
            with self._lock:
                self._num_bytes_held -= num_bytes_held
            raise
        with self._lock:
            self._num_bytes_by_file[str(file)] = num_bytes_held
        return refs

    def free(self, file: str) -> None:
        """Remove a group's file, which frees its memory. Freeing a file of this writer twice is a bug.

        The file may be one that a dead writer of the same folder left. It is removed if it still exists.
        """
        if not self._wrote(file):
            assert self._is_here(file), f"{file} is not of a writer of this folder"
            Path(file).unlink(missing_ok=True)
            return
        with self._lock:
            assert file in self._num_bytes_by_file, f"{file} was freed already"
            num_bytes = self._num_bytes_by_file.pop(file)
        os.unlink(file)
        with self._lock:
            self._num_bytes_held -= num_bytes

    def holds(self, file: str) -> bool:
        """Whether ``file`` exists and is of this writer, or was left in the folder by another one."""
        if self._wrote(file):
            return file in self._num_bytes_by_file
        return self._is_here(file) and Path(file).is_file()

    def _wrote(self, file: str) -> bool:
        return Path(file).name.startswith(f"{self._token}-")

    def _is_here(self, file: str) -> bool:
        return Path(file).parent == self._folder

    def _reserve(self, num_bytes: int) -> Path:
        """Reserve memory for a new file and return its path.

        A file counts before it is written, so that concurrent threads together cannot exceed the capacity.
        """
        with self._lock:
            if self._num_bytes_held + num_bytes > self._capacity_bytes:
                raise PayloadStoreFull(
                    f"a group needs {num_bytes:,} bytes; payloads of this generator may take "
                    f"{self._capacity_bytes:,} bytes and take {self._num_bytes_held:,} already"
                )
            self._num_bytes_held += num_bytes
            self._num_groups += 1
            return self._folder / f"{self._token}-{self._num_groups - 1:08d}.group"

    def _write_file(
        self, file: Path, num_bytes: int, payloads: Sequence[Arrays], lengths: Sequence[int]
    ) -> list[PayloadRef]:
        unfinished = self._folder / f".{secrets.token_hex(16)}"
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            memory = _allocate(descriptor, num_bytes)
            refs, offset = [], 0
            for index, (arrays, length) in enumerate(zip(payloads, lengths, strict=True)):
                payload_id = f"{file.stem}-{index:06d}"
                refs.append(
                    PayloadRef(
                        payload_id=payload_id,
                        host_id=self._host_id,
                        file=str(file),
                        offset=offset,
                        num_bytes=length,
                        checksum=write_into(memory[offset : offset + length], arrays, payload_id),
                    )
                )
                offset += align(length)
            unfinished.rename(file)
        except BaseException:
            unfinished.unlink()
            raise
        finally:
            os.close(descriptor)
        return refs


def _allocate(descriptor: int, num_bytes: int) -> memoryview:
    """Allocate the memory of a new file and map it.

    Raises:
        PayloadStoreFull: The host's shared memory has less left.
    """
    try:
        # Without this, a full /dev/shm would kill the process with SIGBUS in the middle of a copy.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        filesystem = os.fstatvfs(descriptor)
        raise PayloadStoreFull(
            f"a group needs {num_bytes:,} bytes, but this host's shared memory has only "
            f"{filesystem.f_bavail * filesystem.f_frsize:,} left: another program has filled it"
        ) from error
    # Mapping all pages at once is faster than a page fault for each.
    return memoryview(mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))


def map_payload(ref: PayloadRef, *, is_writable: bool = False) -> memoryview:
    """Map a payload of this host and return its bytes. The view keeps the pages alive.

    Raises:
        PayloadNotFound: The file does not exist.
        PayloadTorn: The file is too short.
    """
    try:
        descriptor = os.open(ref.file, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _gone(ref) from error
    try:
        num_file_bytes = os.fstat(descriptor).st_size
        if num_file_bytes < ref.offset + ref.num_bytes:
            raise _torn(
                ref,
                "length of the file in bytes",
                expected=f"at least {ref.offset + ref.num_bytes}",
                found=num_file_bytes,
            )
        # A mapping starts at a page boundary. Only this payload's pages are mapped; others read the rest.
        start = ref.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        skipped = ref.offset - start
        mapping = mmap.mmap(
            descriptor,
            skipped + ref.num_bytes,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0),
            offset=start,
        )
    finally:
        os.close(descriptor)
    return memoryview(mapping)[skipped:]


class PayloadReader:
    """Reads payloads that lie on its own host, or on a disk that all hosts share."""

    def __init__(self, host_id: str) -> None:
        self._host_id = host_id

    def read(self, ref: PayloadRef, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return the arrays of a payload.

        Without ``copy``, they are read-only views of the shared memory, which stays allocated until the last
        view is gone. If the writer frees the file earlier, this memory does not count as held.

        Raises:
            PayloadNotFound: The file was freed, or never existed.
            PayloadTorn: The bytes are not those that were written.
            ValueError: The payload lies on another host.
        """
        if ref.host_id not in (self._host_id, EVERY_HOST):
            raise ValueError(
                f"payload {ref.payload_id} is on host {ref.host_id}, this is host {self._host_id}; "
                "must be read with a RemotePayloadReader"
            )
        return read_from(map_payload(ref), ref, copy=copy)


Expose = Callable[[PayloadRef], Awaitable["RDMABuffer"]]
"""``PayloadServer.expose`` of a payload's owner: the ``call_one`` of its endpoint, or the method itself."""


class PayloadServer:
    """Exposes the payloads of one writer, and those that dead writers of its folder left, to other hosts.

    It lives in the writer's process, inside an actor. A payload is registered with its first ``expose``, and
    stays registered until its file is freed. Measured over TCP on two cores: a registration takes 0.1 to
    0.4 ms, the first one of a process 17 ms, and reading 16 MiB takes 25 to 35 ms. Each payload has its own
    registration because a buffer can only be read whole: with one registration per file, reading a payload
    would move the whole group.
    """

    def __init__(self, writer: PayloadWriter) -> None:
        self._writer = writer
        self._buffers: dict[str, dict[str, RDMABuffer]] = {}

    def expose(self, ref: PayloadRef) -> "RDMABuffer":
        """Return a handle for reading a payload's bytes, including its header.

        Raises:
            PayloadNotFound: The file was freed, or is not in this writer's folder.
            PayloadTorn: The file is too short.
        """
        from monarch.rdma import RDMABuffer

        if not self._writer.holds(ref.file):
            raise _gone(ref)
        buffers = self._buffers.setdefault(ref.file, {})
        if ref.payload_id not in buffers:
            # RDMA hardware registers memory for local writes too, and does not accept read-only pages.
            buffers[ref.payload_id] = RDMABuffer(map_payload(ref, is_writable=True))
        return buffers[ref.payload_id]

    async def free(self, file: str) -> None:
        """Free a group's file and its payloads' registrations. Existing handles stop working."""
        self._writer.free(file)
        for buffer in self._buffers.pop(file, {}).values():
            await buffer.drop()


class RemotePayloadReader:
    """Reads payloads of other hosts, one at a time, through a receive buffer that it reuses."""

    def __init__(self, timeout_s: int) -> None:
        """``timeout_s`` limits the transfer of one payload."""
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._bytes: torch.Tensor | None = None

    async def read(self, ref: PayloadRef, expose: Expose) -> dict[str, np.ndarray]:
        """Return the arrays of a payload, each with its own memory.

        Raises:
            PayloadNotFound: The file was freed, or never existed.
            PayloadTorn: The bytes that arrived are not those that were written.
            Exception: The transfer failed or timed out although the payload exists; an error of Monarch.
        """
        import torch

        handle = await _expose(ref, expose)
        if handle.size() != ref.num_bytes:
            raise _torn(ref, "length in bytes", expected=ref.num_bytes, found=handle.size())
        async with self._lock:
            if self._bytes is None or len(self._bytes) < ref.num_bytes:
                self._bytes = torch.empty(ref.num_bytes, dtype=torch.uint8)
            destination = self._bytes[: ref.num_bytes]
            try:
                await handle.read_into(destination, timeout=self._timeout_s)
            except BaseException as error:
                # Late bytes of this transfer must not overwrite the next payload, which gets another buffer.
                self._bytes = None
                if isinstance(error, Exception):
                    # If the file was freed meanwhile, Monarch raises a plain Exception, but the owner raises
                    # PayloadNotFound.
                    await _expose(ref, expose)
                raise
            return read_from(destination.numpy().data, ref, copy=True)


async def _expose(ref: PayloadRef, expose: Expose) -> "RDMABuffer":
    from monarch.actor import ActorError

    try:
        return await expose(ref)
    except ActorError as error:
        if isinstance(error.exception, PayloadNotFound | PayloadTorn):
            raise error.exception from error
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPayload:
    """Payloads of one group. ``prompts`` are distinct; rollout i has prompt ``prompt_of[i]``."""

    prompts: tuple[Arrays, ...]
    responses: tuple[Arrays, ...]
    prompt_of: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrace:
    """Arrays of one rollout that the trainer needs. Ids are int32, log-probabilities float32."""

    prompt_ids_P: np.ndarray
    response_ids_T: np.ndarray
    logprobs_T: np.ndarray
    routed_experts: RoutedExperts | None
    """Routing of prompt and response; None if not recorded."""
    kept_tokens: KeptTokens | None
    """Kept sets of the response; None if not recorded or if the whole vocabulary was kept throughout."""
    is_sampled_T: np.ndarray | None = None
    """Whether each response token was sampled, bool; None if all were."""
    teacher: TeacherRecord | None = None
    """Record of the teacher; None if no teacher has scored the rollout."""


def encode_group(rollouts: Sequence[Rollout]) -> GroupPayload:
    """Return the payloads of a group's rollouts. ``decode_rollout`` is the inverse for one rollout."""
    prompts: dict[tuple[bytes, ...], Arrays] = {}
    places: dict[tuple[bytes, ...], int] = {}
    prompt_of, responses = [], []
    for rollout in rollouts:
        prompt_record, response_record = None, None
        if rollout.routed_experts is not None:
            prompt_record, response_record = rollout.routed_experts.split(len(rollout.prompt_ids_P))
        prompt = {"ids": rollout.prompt_ids_P, **_routing_arrays(prompt_record)}
        content = tuple(array.tobytes() for array in prompt.values())
        prompts.setdefault(content, prompt)
        prompt_of.append(places.setdefault(content, len(places)))
        responses.append(
            {
                "ids": rollout.response_ids_T,
                "logprobs": rollout.logprobs_T,
                **_routing_arrays(response_record),
                **_kept_arrays(rollout.kept_tokens),
                **({} if rollout.is_sampled_T is None else {"is_sampled": rollout.is_sampled_T}),
            }
        )
    return GroupPayload(
        prompts=tuple(prompts.values()), responses=tuple(responses), prompt_of=tuple(prompt_of)
    )


def decode_rollout(prompt: Arrays, response: Arrays) -> TokenTrace:
    """Return one rollout from its two payloads."""
    records = [
        RoutedExperts(expert_ids_RMK=arrays["expert_ids"], is_recorded_S=arrays["is_recorded"])
        for arrays in (prompt, response)
        if "expert_ids" in arrays
    ]
    assert len(records) in (0, 2), "prompt and response are recorded alike"
    kept = None
    if "kept_widths" in response:
        kept = KeptTokens.of_widths(response["kept_widths"], response["kept_ids"])
    return TokenTrace(
        prompt_ids_P=prompt["ids"],
        response_ids_T=response["ids"],
        logprobs_T=response["logprobs"],
        routed_experts=concatenate_routing(records) if records else None,
        kept_tokens=kept,
        is_sampled_T=response.get("is_sampled"),
        teacher=teacher_record(response),
    )


def _routing_arrays(record: RoutedExperts | None) -> dict[str, np.ndarray]:
    if record is None:
        return {}
    return {"expert_ids": record.expert_ids_RMK, "is_recorded": record.is_recorded_S}


def _kept_arrays(kept: KeptTokens | None) -> dict[str, np.ndarray]:
    if kept is None:
        return {}
    return {"kept_widths": np.diff(kept.offsets).astype(np.int32), "kept_ids": kept.ids_N}
