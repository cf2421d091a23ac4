"""Finds out, from an engine's own loaders, where it puts the weights of a checkpoint. For vLLM 0.32.

vLLM fuses parameters (q, k and v; gate and up; all experts of a layer) and cuts them for tensor parallelism.
Its model classes know how; here they are asked to load tensors without storage while every copy they make is
written down instead of carried out. What comes out is exact for any model whose loaders only cut and copy;
a loader that computes with the values is refused.

Can go when vLLM tells where the parts of a checkpoint lie in its parameters.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forgeasync.weights import Box

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Part of a checkpoint's tensor, and where the engine keeps it.

    ``target_strides`` has one entry per dimension of the box: dimensions may be swapped on the way.
    """

    name: str
    box: Box
    parameter: str
    target_offset: int
    target_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTrace:
    """The parts of a checkpoint that one worker of an engine takes."""

    regions: tuple[Region, ...]
    unfilled: tuple[str, ...]
    """Parameters with elements that no tensor fills, with how many."""
    other_dtypes: tuple[str, ...]
    """Parameters of another dtype than the tensors."""
    untraceable: tuple[str, ...]
    """Tensors that the engine does not take as they are, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    """A worker's answer to what it takes, and how."""

    trace: LoadTrace
    foreign: tuple[str, ...] = ()
    """Tensors that the folder which the worker has loaded does not have."""
    reload_because: tuple[str, ...] = ()
    """Reasons why copies into the parameters would be wrong (see ``forgeasync.generator.gpu_worker``)."""


class _CopyRecorder(TorchDispatchMode):
    """Writes down copies into the parameters instead of making them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._parameter_of = {tensor.untyped_storage()._cdata: name for name, tensor in parameters.items()}
        self.copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.num_filled = dict.fromkeys(parameters, 0)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.copy_.default or func in (aten.fill_.Scalar, aten.zero_.default):
            parameter = self._parameter_of.get(args[0].untyped_storage()._cdata)
            if parameter is not None:
                self.num_filled[parameter] += args[0].numel()
                if func is aten.copy_.default:
                    self.copies.append((parameter, args[0], args[1]))
                return args[0]
        return func(*args, **(kwargs or {}))


def trace_load(
    model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> LoadTrace:
    """Find what ``model.load_weights`` would copy where, given tensors of these names and shapes.

    Values do not change; nothing may run the model meanwhile.
    """
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    recorder = _CopyRecorder(parameters)
    sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    name_of = {source.untyped_storage()._cdata: name for name, source in sources.items()}
    untraceable = []
    waiting = deque(sources.items())
    while waiting:
        last = ""

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            while waiting:
                last, source = waiting.popleft()
                yield last, source

        try:
            with recorder:
                # torch types every other attribute of a module as a tensor or a module.
                model.load_weights(tensors())  # type: ignore[operator]
        except Exception as error:
            # The loader stopped at this one: the others are still to be seen.
            untraceable.append(f"{last} {shapes[last]}: {type(error).__name__}: {error}")
    regions = []
    for parameter, target, source in recorder.copies:
        name = name_of.get(source.untyped_storage()._cdata)
        region = None if name is None else _region(name, shapes[name], parameter, target, source)
        if region is None:
            untraceable.append(f"{name or 'a tensor'} -> {parameter}: its loader computes with the values")
        else:
            regions.append(region)
    return LoadTrace(
        regions=tuple(regions),
        unfilled=_unfilled(parameters, recorder.num_filled),
        other_dtypes=tuple(
            f"{name} ({parameter.dtype})"
            for name, parameter in parameters.items()
            if parameter.dtype != dtype
        ),
        untraceable=tuple(untraceable),
    )


def _unfilled(parameters: Mapping[str, torch.Tensor], num_filled: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(
        f"{name} ({parameter.numel() - num_filled[name]} of {parameter.numel()} elements)"
        for name, parameter in parameters.items()
        if num_filled[name] < parameter.numel()
    )


def _region(
    name: str, shape: tuple[int, ...], parameter: str, target: torch.Tensor, source: torch.Tensor
) -> Region | None:
    """None where ``source`` is no box of its tensor."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if target.shape != source.shape:
        return None
    position, start = source.storage_offset(), []
    for stride in strides:
        start.append(position // stride)
        position %= stride
    # Which dimension of the tensor each dimension of the view runs over; unit dimensions run over none.
    size, target_strides = [1] * len(shape), [0] * len(shape)
    for length, stride, target_stride in zip(source.shape, source.stride(), target.stride(), strict=True):
        if length == 1:
            continue
        dims = [dim for dim in range(len(shape)) if strides[dim] == stride and shape[dim] > 1]
        if len(dims) != 1 or size[dims[0]] != 1:
            return None
        size[dims[0]], target_strides[dims[0]] = length, target_stride
    if any(first + count > whole for first, count, whole in zip(start, size, shape, strict=True)):
        return None
    if math.prod(size) != source.numel():
        return None
    return Region(
        name=name,
        box=Box(start=tuple(start), size=tuple(size)),
        parameter=parameter,
        target_offset=int(target.storage_offset()),
        target_strides=tuple(target_strides),
    )
