"""What vLLM's GPU worker needs to take weights out of a landing, as its ``worker_extension_cls``.

GPU kernels keep some parameters in orders of their own, which vLLM's ``reload_weights`` restores and makes
again: whole tensors go through it, one at a time, from host memory. Written against vLLM 0.32; not run yet on
a GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from forgeasync.weights.fetcher import landing_images
from forgeasync.weights.layout import WeightLayout


class ReloadingWorker:
    """The same methods as ``UpdatableCPUWorker`` has; the swap itself reads the landing."""

    def trace_weights(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        """Nothing to find out: every tensor is given to vLLM's own loaders whole."""

    def connect_weights(self, layout: WeightLayout, landing: Path) -> None:
        """Map the landing."""
        self._layout = layout
        self._images = landing_images(landing, layout)

    def start_staging(self) -> None:
        """Nothing to make ready: a second copy of the weights would not fit on most GPUs."""

    def staging_done(self) -> bool:
        return True

    def swap_weights(self) -> None:
        """Load every tensor of the landing."""
        self.model_runner.reload_weights(weights_iterator=whole_tensors(self._layout, self._images))


def whole_tensors(layout: WeightLayout, images: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a landing by name; those in one piece are views, the others are put together."""
    parts: dict[str, list[tuple[tuple[slice, ...], torch.Tensor]]] = {}
    for rank, image in zip(layout.ranks, images, strict=True):
        for piece in rank.pieces:
            first = piece.offset // layout.dtype.itemsize
            count = piece.box.num_elements
            place = tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.size, strict=True))
            for index, name in enumerate(piece.names):
                start = first + index * count
                parts.setdefault(name, []).append((place, image[start : start + count].view(piece.box.size)))
    for name, shape in layout.shapes.items():
        if len(parts[name]) == 1:
            yield name, parts[name][0][1]
            continue
        whole = torch.empty(shape, dtype=layout.dtype)
        for place, part in parts[name]:
            whole[place] = part
        yield name, whole
