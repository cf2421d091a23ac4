"""Finds where an engine's own loaders put the weights of a checkpoint. For vLLM 0.32.

vLLM fuses parameters (q, k and v; gate and up; all experts of a layer) and shards them for tensor
parallelism, in code of its model classes. Here these classes load tensors without storage, and every copy is
recorded instead of executed. The result is exact for any model whose loaders only slice, transpose, copy and
set to zero; a loader that computes with the values is refused.

Can go when vLLM reports where the parts of a checkpoint are in its parameters.

``OperatorWatch`` traces what operators compute, for ``GeneratorEngine.first_different_operator``.
"""

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forgeasync.weights import Box

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Part of a checkpoint tensor, and where the engine stores it.

    ``target_strides`` has one entry per dimension of ``box``, because loaders may transpose dimensions.
    """

    name: str
    box: Box
    parameter: str
    target_offset: int
    target_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTrace:
    """Parts of a checkpoint that one worker of an engine loads."""

    regions: tuple[Region, ...]
    unfilled: tuple[str, ...]
    """Parameters with elements that no tensor fills, with their number."""
    other_dtypes: tuple[str, ...]
    """Parameters whose dtype differs from that of the tensors."""
    untraceable: tuple[str, ...]
    """Tensors that the engine's loaders do not copy unchanged, with the reason."""

    @classmethod
    def of(
        cls, model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> "LoadTrace":
        """Find what ``model.load_weights`` would copy where, given tensors of these names and shapes.

        Values do not change. The model must not run meanwhile.
        """
        parameters = {name: parameter.data for name, parameter in model.named_parameters()}
        sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        recorder = _CopyRecorder(
            parameters, {source.untyped_storage()._cdata: name for name, source in sources.items()}
        )
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
                # The loader stopped at this tensor; continue with the remaining ones.
                untraceable.append(f"{last} {shapes[last]}: {type(error).__name__}: {error}")
        regions = []
        for parameter, target, source, name in recorder.copies:
            if name == _ZEROS:
                # The parameter has them from its start.
                continue
            region = None if name is None else _region(name, shapes[name], parameter, target, source)
            if region is None:
                untraceable.append(
                    f"{name or 'a tensor'} -> {parameter}: its loader computes with the values"
                )
            else:
                regions.append(region)
        return cls(
            regions=tuple(regions),
            unfilled=_unfilled(parameters, recorder.num_filled),
            other_dtypes=tuple(
                f"{name} ({parameter.dtype})"
                for name, parameter in parameters.items()
                if parameter.dtype != dtype
            ),
            untraceable=tuple(untraceable),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    """Result of one worker's ``trace_weights``."""

    trace: LoadTrace
    foreign: tuple[str, ...] = ()
    """Tensors that are not in the folder that the worker has loaded."""
    reload_because: tuple[str, ...] = ()
    """Reasons why copies into the parameters would be wrong (see ``forgeasync.generator.gpu_worker``)."""


_ZEROS = ""
"""Name of what a loader has set to zero."""


class _CopyRecorder(TorchDispatchMode):
    """Records copies into the parameters instead of executing them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], name_of: Mapping[int, str]) -> None:
        super().__init__()
        self._name_of = dict(name_of)
        self._parameter_of = {tensor.untyped_storage()._cdata: name for name, tensor in parameters.items()}
        self.copies: list[tuple[str, torch.Tensor, torch.Tensor, str | None]] = []
        self.num_filled = dict.fromkeys(parameters, 0)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.copy_.default or func in (aten.fill_.Scalar, aten.zero_.default):
            parameter = self._parameter_of.get(args[0].untyped_storage()._cdata)
            if parameter is not None:
                self.num_filled[parameter] += args[0].numel()
                if func is aten.copy_.default:
                    name = self._name_of.get(args[1].untyped_storage()._cdata)
                    self.copies.append((parameter, args[0], args[1], name))
                return args[0]
        if func is aten.clone.default and args[0].untyped_storage()._cdata in self._name_of:
            # Of a transposed view, for example: the copy of it is a copy of the tensor.
            return args[0]
        if func._schema.is_mutable and args[0].untyped_storage()._cdata in self._name_of:
            return self._change(func, args[0])
        return func(*args, **(kwargs or {}))

    def _change(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Note that a loader changes a tensor: a rank sets to zero what another one adds."""
        storage = tensor.untyped_storage()._cdata
        is_whole = func is aten.zero_.default and tensor.nbytes == tensor.untyped_storage().nbytes()
        if is_whole:
            self._name_of[storage] = _ZEROS
        else:
            del self._name_of[storage]
        return tensor


def _unfilled(parameters: Mapping[str, torch.Tensor], num_filled: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(
        f"{name} ({parameter.numel() - num_filled[name]} of {parameter.numel()} elements)"
        for name, parameter in parameters.items()
        if num_filled[name] < parameter.numel()
    )


def _region(
    name: str, shape: tuple[int, ...], parameter: str, target: torch.Tensor, source: torch.Tensor
) -> Region | None:
    """Return the region of a copy; None if ``source`` is not a ``Box`` of its tensor."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if target.shape != source.shape:
        return None
    position, start = source.storage_offset(), []
    for stride in strides:
        start.append(position // stride)
        position %= stride
    # Match each dimension of the view with one of the tensor; dimensions of size 1 match none.
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


class OperatorWatch:
    """Keeps the last row of what modules return in the last forward pass, until ``end``."""

    def __init__(self, model: torch.nn.Module, names: Collection[str]) -> None:
        """Watch the modules of these names (``lm_head``: the logits)."""
        self._seen: dict[str, np.ndarray] = {}
        self._hooks = []
        names_of: dict[torch.nn.Module, list[str]] = {}
        # All layers share a rotary embedding.
        for name, module in model.named_modules(remove_duplicate=False):
            if (name := "lm_head" if name == "logits_processor" else name) in names:
                names_of.setdefault(module, []).append(name)
        for module, in_turn in names_of.items():
            turns = itertools.cycle(in_turn)

            def keep(_: torch.nn.Module, given: Any, found: Any, turns: Iterator[str] = turns) -> None:
                name = next(turns)
                parts = found if isinstance(found, tuple) else (found,)
                # Norms also return the residual, and linear layers their bias.
                used = parts if name.endswith("rotary_emb") else parts[:1]
                self._seen[name] = torch.cat([one[-1].flatten() for one in used]).float().cpu().numpy()

            self._hooks.append(module.register_forward_hook(keep))

    def end(self) -> dict[str, np.ndarray]:
        """Return what was kept, by name."""
        for hook in self._hooks:
            hook.remove()
        return self._seen
