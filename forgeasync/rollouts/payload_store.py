"""Payloads in a host's shared memory: one file per group, written by the generator that owns it.

A file outlives its writer: where that is gone, any generator of the host frees and shows what it has left.

A writer never changes a file that has its final name, and a reader only knows final names: it finds a whole
file or none. A reader that has mapped a file keeps its pages, also after the file was freed.
"""

import errno
import mmap
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from forgeasync.rollouts.payload_format import (
    EVERY_HOST,
    PayloadRef,
    align,
    gone,
    measure,
    read_from,
    torn,
    whole_pages,
    write_into,
)


class PayloadStoreFull(MemoryError):
    """A group does not fit into what its writer may hold."""


class PayloadWriter:
    """The payloads of one generator proc, held until they are freed; may be called from any thread."""

    def __init__(self, folder: Path, host_id: str, capacity_bytes: int) -> None:
        """Write into ``folder`` of this host; all files together never take more than ``capacity_bytes``."""
        assert folder.is_dir(), f"{folder} is no folder"
        self._folder = folder
        self._host_id = host_id
        self._capacity_bytes = capacity_bytes
        # Many writers share the folder, and a run shares its payload ids.
        self._token = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._num_groups = 0
        self._num_payloads = 0
        self._num_bytes_held = 0
        self._num_bytes_by_file: dict[str, int] = {}

    @property
    def num_bytes_held(self) -> int:
        """Memory that the files take, those being written included."""
        return self._num_bytes_held

    def write_group(self, payloads: Sequence[Mapping[str, np.ndarray]]) -> list[PayloadRef]:
        """Write a group's payloads into one new file; their references, in the same order.

        Raises:
            PayloadStoreFull: the group does not fit into the capacity, or the host's shared memory is full.
            ValueError: an array has a dtype that a payload cannot hold.
        """
        assert payloads, "a group without payloads"
        lengths = [measure(arrays) for arrays in payloads]
        num_file_bytes = sum(align(length) for length in lengths[:-1]) + lengths[-1]
        file, first_payload = self._reserve(num_file_bytes, len(payloads))
        try:
            refs = self._write_file(file, payloads, lengths, first_payload)
        except BaseException:
            with self._lock:
                self._num_bytes_held -= whole_pages(num_file_bytes)
            raise
        with self._lock:
            self._num_bytes_by_file[file] = whole_pages(num_file_bytes)
        return refs

    def free(self, file: str) -> None:
        """Give a group's memory back. A file is freed once, by who decides over it: twice is a bug."""
        with self._lock:
            assert file in self._num_bytes_by_file, f"{file} was freed already, or is not of this writer"
            num_bytes = self._num_bytes_by_file.pop(file)
        os.unlink(file)
        with self._lock:
            self._num_bytes_held -= num_bytes

    def free_left(self, file: str) -> None:
        """Remove a file that a writer of this folder has left which is gone; no error if it is freed."""
        assert not self.wrote(file) and self._is_here(file), f"{file} is not of another writer of this folder"
        Path(file).unlink(missing_ok=True)

    def wrote(self, file: str) -> bool:
        """Whether this writer has written ``file``."""
        return Path(file).name.startswith(f"{self._token}-")

    def holds(self, file: str) -> bool:
        """Whether ``file`` can be read: of this writer, or left by another one, and not freed."""
        if self.wrote(file):
            return file in self._num_bytes_by_file
        return self._is_here(file) and Path(file).is_file()

    def _is_here(self, file: str) -> bool:
        return Path(file).parent == self._folder

    def _reserve(self, num_file_bytes: int, num_payloads: int) -> tuple[str, int]:
        """Count a file before it is written, so that threads cannot exceed the capacity together."""
        asked = whole_pages(num_file_bytes)
        with self._lock:
            if self._num_bytes_held + asked > self._capacity_bytes:
                raise PayloadStoreFull(
                    f"a group needs {asked:,} bytes; payloads of this generator may take "
                    f"{self._capacity_bytes:,} bytes and take {self._num_bytes_held:,} already"
                )
            self._num_bytes_held += asked
            file = str(self._folder / f"{self._token}-{self._num_groups:08d}.group")
            first_payload = self._num_payloads
            self._num_groups += 1
            self._num_payloads += num_payloads
        return file, first_payload

    def _write_file(
        self,
        file: str,
        payloads: Sequence[Mapping[str, np.ndarray]],
        lengths: Sequence[int],
        first_payload: int,
    ) -> list[PayloadRef]:
        unfinished = self._folder / f".{secrets.token_hex(16)}"
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            memory = _allocate(descriptor, sum(align(length) for length in lengths[:-1]) + lengths[-1])
            refs, offset = [], 0
            for index, (arrays, num_bytes) in enumerate(zip(payloads, lengths, strict=True)):
                payload_id = f"{self._token}-{first_payload + index:012d}"
                checksum = write_into(memory[offset : offset + num_bytes], arrays, payload_id)
                refs.append(
                    PayloadRef(
                        payload_id=payload_id,
                        host_id=self._host_id,
                        file=file,
                        offset=offset,
                        num_bytes=num_bytes,
                        checksum=checksum,
                    )
                )
                offset += align(num_bytes)
            unfinished.rename(file)
        except BaseException:
            unfinished.unlink()
            raise
        finally:
            os.close(descriptor)
        return refs


def _allocate(descriptor: int, num_bytes: int) -> memoryview:
    """Give a new file its memory and map it.

    Raises:
        PayloadStoreFull: the host has not that much.
    """
    try:
        # Without this a full /dev/shm shows as SIGBUS in the middle of a copy, which ends the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        filesystem = os.fstatvfs(descriptor)
        raise PayloadStoreFull(
            f"a group needs {num_bytes:,} bytes, but this host's shared memory has only "
            f"{filesystem.f_bavail * filesystem.f_frsize:,} left: another program has filled it"
        ) from error
    # Mapping all pages at once costs less than a page fault for each of them.
    return memoryview(mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))


def map_payload(ref: PayloadRef, *, is_writable: bool = False) -> memoryview:
    """The bytes of a payload of this host; the pages stay for as long as the view does.

    Raises:
        PayloadGone: there is no such file (any more).
        PayloadTorn: the file is too short.
    """
    try:
        descriptor = os.open(ref.file, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise gone(ref) from error
    try:
        num_file_bytes = os.fstat(descriptor).st_size
        if num_file_bytes < ref.offset + ref.num_bytes:
            raise torn(
                ref,
                "length of the file in bytes",
                expected=f"at least {ref.offset + ref.num_bytes}",
                found=num_file_bytes,
            )
        # A mapping starts at a page; only this payload's pages are mapped, the rest belongs to other ranks.
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
    """Reads payloads that lie on its own host, or on a disk that it shares with others."""

    def __init__(self, host_id: str) -> None:
        self._host_id = host_id

    def read(self, ref: PayloadRef, *, copy: bool = True) -> dict[str, np.ndarray]:
        """A payload's arrays.

        Without ``copy`` they are read-only views of the shared memory, which is then held until the last of
        them is gone: beyond what the writer counts, if it frees the file before.

        Raises:
            PayloadGone: the file was freed, or never existed.
            PayloadTorn: the bytes are not those that were written.
            ValueError: the payload lies on another host.
        """
        if ref.host_id not in (self._host_id, EVERY_HOST):
            raise ValueError(
                f"payload {ref.payload_id} is on host {ref.host_id}, this is host {self._host_id}; "
                "must be read with a RemotePayloadReader"
            )
        return read_from(map_payload(ref), ref, copy=copy)
