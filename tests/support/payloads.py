"""Payloads to write and compare, and what child processes do with them: they import little, to be quick."""

import os
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from forgeasync.rollouts import PayloadNotFound, PayloadReader, PayloadRef, PayloadWriter
from forgeasync.rollouts import payloads as shared_memory

MIB = 2**20
HOST = "host-a"


def make_payload(seed: int, num_tokens: int = 500) -> dict[str, np.ndarray]:
    """Arrays that ``seed`` determines."""
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, 1000, num_tokens, dtype=np.int32),
        "routed_experts": rng.integers(0, 128, (num_tokens, 4, 2), dtype=np.uint8),
        "none": np.zeros((0, 3), np.float32),
    }


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Same names in the same order, same dtypes, shapes and values."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def write_and_die(folder: Path) -> None:
    """Killed in the middle of writing a group."""

    def stop_here(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    shared_memory.write_into = stop_here
    PayloadWriter(folder, HOST, MIB).write_group([make_payload(0)])


def read_for_ever(refs: list[tuple[int, PayloadRef]], link: Connection) -> None:
    """Check payloads (seed and reference) until killed; says so after the first, or what went wrong."""
    reader, rng, has_read = PayloadReader(HOST), random.Random(os.getpid()), False
    while True:
        seed, ref = rng.choice(refs)
        try:
            assert_same(reader.read(ref, copy=rng.random() < 0.5), make_payload(seed))
        except PayloadNotFound:
            continue  # the writer goes on meanwhile
        except BaseException as error:
            link.send(repr(error))
            raise
        if not has_read:
            has_read = True
            link.send("reading")
