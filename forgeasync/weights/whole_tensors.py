"""The tensors in a landing, put together again."""

from collections.abc import Iterator, Sequence

import torch

from forgeasync.weights.layout import WeightLayout


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
