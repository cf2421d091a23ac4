"""Versions of the weights in torchstore: trainer ranks publish shards, generators fetch whole tensors.

Every version has keys of its own and its manifest is written last, by one rank, after all ranks have put
their shards: a reader sees a whole version or none. Versions are dropped explicitly, once no reader can
still want them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torchstore
from monarch.actor import ProcMesh

from forgeasync.weights import torchstore_adapter as torchstore_adapter
from forgeasync.weights.buckets import Bucket, NamedWeight, plan_buckets, stack, unstack

MAX_BUCKET_BYTES = 256 * 2**20
"""A bucket is one message; two of them fit easily beside an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a published version consists of."""

    version: int
    buckets: tuple[Bucket, ...]
    num_bytes: int


async def open_store(storage: ProcMesh) -> None:
    """Start torchstore with one storage volume on ``storage``; once per run, before publishing."""
    await torchstore.initialize(num_storage_volumes=1, mesh=storage)


def _bucket_key(version: int, bucket: Bucket) -> str:
    return f"weights/{version}/{bucket.index}"


def _manifest_key(version: int) -> str:
    return f"manifest/{version}"


async def put_shards(version: int, weights: Sequence[NamedWeight], dtype: torch.dtype) -> Manifest:
    """Copy this rank's shards (cast to ``dtype``) into the store; every rank calls it with the same names."""
    plan = plan_buckets(weights, max_bytes=MAX_BUCKET_BYTES)
    num_bytes = 0
    for bucket, members in plan:
        stacked = stack(members, dtype)
        num_bytes += stacked.numel() * stacked.element_size()
        await torchstore.put(_bucket_key(version, bucket), stacked)
    return Manifest(version=version, buckets=tuple(bucket for bucket, _ in plan), num_bytes=num_bytes)


async def commit(manifest: Manifest) -> None:
    """Make a version visible; one caller, after every rank's ``put_shards``."""
    await torchstore.put(_manifest_key(manifest.version), manifest)


async def fetch(version: int) -> list[tuple[str, torch.Tensor]]:
    """All weights of a committed version, whole, by Hugging Face name.

    Raises:
        KeyError: the version was never committed or is dropped already.
    """
    manifest: Manifest = await torchstore.get(_manifest_key(version))
    tensors = await asyncio.gather(
        *(torchstore.get(_bucket_key(version, bucket)) for bucket in manifest.buckets)
    )
    return [
        pair
        for bucket, tensor in zip(manifest.buckets, tensors, strict=True)
        for pair in unstack(bucket, tensor)
    ]


async def drop(version: int) -> None:
    """Free a version: the manifest first, so that nobody starts reading it."""
    manifest: Manifest = await torchstore.get(_manifest_key(version))
    await torchstore.delete(_manifest_key(version))
    for bucket in manifest.buckets:
        await torchstore.delete(_bucket_key(version, bucket))
