"""Adapters that have arrived, merged into the base weights that an engine takes.

For engines that cannot serve adapters of experts themselves: only adapters travel, and the generator makes
whole tensors of them beside the engine, from the base model's own files. Tensors that share a parameter of
the engine with an adapted one (q with k and v, gate with up) are made along with it, since a parameter is
exchanged whole.
"""

from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import torch

from forgeasync.models import CheckpointTensors
from forgeasync.weights import (
    ALIGNMENT,
    Box,
    Piece,
    RankLayout,
    ReceiveBuffer,
    WeightLayout,
    merged,
    received_images,
    whole_tensors,
)

PREFIX = "base_model.model."

SIDES = (".lora_A.weight", ".lora_B.weight")

MAX_NAMES = 5
"""In an error message."""


def base_name(adapter_name: str) -> str:
    """The base tensor that an adapter's tensor adapts, by its name in peft's terms."""
    for side in SIDES:
        if adapter_name.startswith(PREFIX) and adapter_name.endswith(side):
            return adapter_name.removeprefix(PREFIX).removesuffix(side) + ".weight"
    raise AssertionError(f"{adapter_name} is no adapter's tensor")


def merged_layout(
    shapes: Mapping[str, tuple[int, ...]], names: Iterable[str], dtype: torch.dtype
) -> WeightLayout:
    """Whole tensors ``names``, one after the other, as if one rank had published them."""
    pieces, end = [], 0
    for name in names:
        box = Box(start=(0,) * len(shapes[name]), size=shapes[name])
        start = -(-end // ALIGNMENT) * ALIGNMENT
        pieces.append(Piece(names=(name,), shape=shapes[name], box=box, offset=start))
        end = start + box.num_elements * dtype.itemsize
    rank = RankLayout(rank=0, host_id="", pieces=tuple(pieces), num_bytes=end)
    return WeightLayout(dtype=dtype, ranks=(rank,))


class AdapterMerger:
    """Fills one receive buffer with merged weights, out of another one with adapters."""

    def __init__(
        self,
        *,
        base: Path,
        scaling: float,
        adapters: WeightLayout,
        fetched: Path,
        merged: WeightLayout,
        out: Path,
    ) -> None:
        """``base`` is the Hugging Face folder; ``fetched`` and ``out`` are the two receive buffers' files.

        Raises:
            ValueError: an adapter would not be merged: half of it is missing, or the engine does not take the
                tensor that it adapts.
        """
        self._base = CheckpointTensors(base)
        self._scaling = scaling
        self._adapters = adapters
        self._images = received_images(fetched, adapters)
        image = ReceiveBuffer(out, merged).image(0).view(merged.dtype)
        self._targets = dict(whole_tensors(merged, [image]))
        self._adapted = {base_name(name) for name in adapters.shapes}
        self._check(adapters.shapes.keys())
        for name in self._targets.keys() - self._adapted:
            self._targets[name].copy_(self._base[name])

    def _check(self, published: Set[str]) -> None:
        whole = {PREFIX + name.removesuffix(".weight") + side for name in self._adapted for side in SIDES}
        problems = {
            "the other half is missing of": sorted(whole - published),
            "the engine does not take": sorted(self._adapted - self._targets.keys()),
        }
        found = [f"{text} {', '.join(names[:MAX_NAMES])}" for text, names in problems.items() if names]
        if found:
            raise ValueError("adapters that would not be merged: " + "; ".join(found))

    @torch.no_grad()
    def merge(self) -> None:
        """Make every adapted tensor anew; takes long, and may run in any thread."""
        sides = dict(whole_tensors(self._adapters, self._images))
        for name in self._adapted:
            stem = PREFIX + name.removesuffix(".weight")
            lora_a, lora_b = (sides[stem + side] for side in SIDES)
            self._targets[name].copy_(merged(self._base[name].float(), lora_a, lora_b, self._scaling))
