"""vLLM's GPU worker, extended to install weights while sequences run (vLLM's ``worker_extension_cls``).

Written for vLLM 0.32 and unquantized models. A version is installed in one of two ways:

- Copies into the parameters (``GpuWeights``). A shadow has the next version of every parameter in the
  kernel's memory order, and is filled while the engine decodes. A shadow on the host is page-locked and
  shared by the workers of equal rank of all generators there, each of which fills a part. A shadow on the
  device belongs to one worker. The swap copies, so parameters keep the addresses that captured CUDA graphs
  expect.
- vLLM's own ``reload_weights``, while decoding is paused. It is needed if a kernel stores its weights in its
  own order, or computes further tensors from them: copies would then be wrong. ``reload_reasons`` checks this
  on the loaded model, by value, before the first update.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from forgeasync.config import ShadowMemory
from forgeasync.generator.engine_weights import HostMemory, by_parameter, stage_in_thread
from forgeasync.generator.workarounds.load_trace import (
    LoadTrace,
    OperatorWatch,
    Region,
    WorkerTrace,
)
from forgeasync.generator.workarounds.vllm_process import read_mxfp4
from forgeasync.models import CheckpointTensors
from forgeasync.weights import (
    ALIGNMENT,
    Box,
    HostShare,
    SharedFile,
    StridedCopy,
    WeightLayout,
    page_lock,
    plan_copies,
    received_images,
    whole_tensors,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

KNOWN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
"""Quantization methods that compute from the parameters themselves, in whatever order they store them."""

# vLLM's workers import this module before they load a model.
read_mxfp4()

MAX_COMPARED = 8
"""Maximum number of regions of a parameter, and of rows of a region, compared with the checkpoint's files."""


class GpuWeights:
    """Parameters of one worker's model, on any device, and their shadow."""

    def __init__(self, model: torch.nn.Module, *, worker_rank: int) -> None:
        self._parameters = {name: parameter.data for name, parameter in model.named_parameters()}
        self._worker_rank = worker_rank
        self._copies: dict[str, list[StridedCopy]] = {}
        self._shadow: _HostShadow | _DeviceShadow | None = None

    def plan(self, copies: Iterable[StridedCopy], host_memory: HostMemory) -> None:
        """Plan the copies of every version. Parameters that are not the target of a copy never change."""
        self._copies = by_parameter(copies)
        changing = {name: self._parameters[name] for name in self._copies}
        if host_memory.shadow is ShadowMemory.DEVICE:
            self._shadow = _DeviceShadow(changing, self._partly_filled())
        else:
            self._shadow = _HostShadow(changing, host_memory, self._worker_rank)

    def _partly_filled(self) -> set[str]:
        """Return the parameters with elements that no copy fills, such as the padding of a vocabulary."""
        return {
            name
            for name, copies in self._copies.items()
            if sum(copy.num_elements for copy in copies) < self._parameters[name].numel()
        }

    def take_share(self, share: HostShare) -> None:
        """Change the part of the shadow that this worker fills."""
        assert self._shadow is not None, "plan first"
        self._shadow.take_share(share)

    @torch.no_grad()
    def stage(self, images: Sequence[torch.Tensor]) -> None:
        """Fill this worker's part of the shadow from the receive buffer's images, while the model runs."""
        assert self._shadow is not None, "plan first"
        for name in self._shadow.own:
            target = self._shadow.begin(name)
            for copy in self._copies[name]:
                copy.target(target).copy_(copy.source(images[copy.rank]))
            self._shadow.end(name)

    @torch.no_grad()
    def swap(self) -> None:
        """Copy the shadow into the parameters. The model must not run meanwhile."""
        assert self._shadow is not None, "plan first"
        for name in self._copies:
            self._parameters[name].copy_(self._shadow.whole(name), non_blocking=True)
        # The host's shadow may be overwritten as soon as this returns.
        _synchronize(self._parameters.values())


class _HostShadow:
    """Shadow in a page-locked file in shared memory of the host, which has whole parameters in sequence."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], host_memory: HostMemory, worker_rank: int
    ) -> None:
        starts, end = {}, 0
        for name, parameter in parameters.items():
            starts[name] = end
            end += -(-_span(parameter) * parameter.itemsize // ALIGNMENT) * ALIGNMENT
        makes_files = host_memory.makes_files
        file = SharedFile(host_memory.shadow_file(worker_rank), end, is_new=makes_files, reserve=makes_files)
        page_lock(file.bytes)
        self._views = {
            name: _like(parameter, file.bytes[starts[name] :]) for name, parameter in parameters.items()
        }
        self._sizes = {name: parameter.nbytes for name, parameter in parameters.items()}
        self.own = host_memory.share.of_sizes(self._sizes)
        if not host_memory.is_joining:
            # Elements that no copy fills keep their loaded values.
            for name in self.own:
                self._views[name].copy_(parameters[name])

    def take_share(self, share: HostShare) -> None:
        self.own = share.of_sizes(self._sizes)

    def begin(self, name: str) -> torch.Tensor:
        return self._views[name]

    def end(self, name: str) -> None:
        """Do nothing: the swap reads the shared memory directly."""

    def whole(self, name: str) -> torch.Tensor:
        return self._views[name]


class _DeviceShadow:
    """Shadow in the worker's device memory; each parameter is assembled on the host first."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], partly_filled: set[str]) -> None:
        self._shadows = {name: parameter.clone() for name, parameter in parameters.items()}
        self._partly_filled = partly_filled
        self.own = list(parameters)
        largest = max((_span(parameter) * parameter.itemsize for parameter in parameters.values()), default=0)
        self._scratch = torch.empty(largest, dtype=torch.uint8)
        page_lock(self._scratch)
        devices = {parameter.device for parameter in parameters.values()}
        self._streams = {device: torch.Stream(device) for device in devices if device.type != "cpu"}

    def take_share(self, share: HostShare) -> None:
        """Do nothing: each worker fills all of its shadow."""

    def begin(self, name: str) -> torch.Tensor:
        shadow = self._shadows[name]
        target = _like(shadow, self._scratch)
        if name in self._partly_filled:
            target.copy_(shadow)
        return target

    def end(self, name: str) -> None:
        """Copy a parameter to the device on a separate stream while decoding continues, and wait for it."""
        shadow = self._shadows[name]
        source = _like(shadow, self._scratch)
        if shadow.device.type == "cpu":
            shadow.copy_(source)
            return
        stream = self._streams[shadow.device]
        with stream:
            shadow.copy_(source, non_blocking=True)
        stream.synchronize()

    def whole(self, name: str) -> torch.Tensor:
        return self._shadows[name]


def _span(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a view of the start of ``memory`` (uint8) with the dtype, shape and strides of ``tensor``."""
    num_bytes = _span(tensor) * tensor.itemsize
    return memory[:num_bytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _synchronize(tensors: Iterable[torch.Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.get_device_module(device).synchronize(device)


def reload_reasons(
    model: torch.nn.Module, trace: LoadTrace, checkpoint: CheckpointTensors
) -> tuple[str, ...]:
    """Return the reasons why copies into a model's parameters would be wrong.

    The model must have the weights of ``checkpoint``. Tensors that the checkpoint lacks are left out, because
    neither way can load them.
    """
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    failed = [line for line in trace.untraceable if line.split(" ")[0] in checkpoint]
    return (
        *derived_tensors(model),
        *(f"its loader does not copy {line}" for line in failed),
        *(f"{line} has another dtype than what is published" for line in trace.other_dtypes),
        *other_orders(parameters, trace.regions, checkpoint),
    )


def derived_tensors(model: torch.nn.Module) -> list[str]:
    """Return the modules that compute further tensors from their weights after loading."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, MLAAttention):
            found.append(f"{name} computes its projections of the latent from kv_b_proj")
            continue
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not isinstance(method, KNOWN_METHODS):
            found.append(f"{name} has {type(method).__name__}")
    return found


def other_orders(
    parameters: Mapping[str, torch.Tensor], regions: Sequence[Region], checkpoint: CheckpointTensors
) -> list[str]:
    """Return the parameters whose values are not where their loader puts them, by comparing samples."""
    of_parameter: dict[str, list[Region]] = {}
    for region in regions:
        of_parameter.setdefault(region.parameter, []).append(region)
    found = []
    for name, parts in of_parameter.items():
        parameter = parameters[name]
        for index in _spread(len(parts)):
            if (difference := _differs(parameter, parts[index], checkpoint)) is not None:
                found.append(f"{name} is kept in an order of its kernel ({difference})")
                break
    return found


def _spread(num_items: int) -> list[int]:
    """Return at most ``MAX_COMPARED`` evenly spread indices, including the first and the last."""
    if num_items <= MAX_COMPARED:
        return list(range(num_items))
    return [index * (num_items - 1) // (MAX_COMPARED - 1) for index in range(MAX_COMPARED)]


def _differs(parameter: torch.Tensor, region: Region, checkpoint: CheckpointTensors) -> str | None:
    box = region.box
    start = parameter.storage_offset() + region.target_offset
    kept = parameter.as_strided(box.size, region.target_strides, start)
    for row in _spread(box.size[0]):
        part = Box(start=(box.start[0] + row, *box.start[1:]), size=(1, *box.size[1:]))
        expected = checkpoint.part(region.name, part.start, part.size).to(parameter.dtype)
        if not torch.equal(kept[row : row + 1].cpu(), expected):
            return f"row {part.start[0]} of {region.name} is not there"
    return None


class UpdatableGPUWorker:
    """GPU counterpart of ``UpdatableCPUWorker``, with the same methods."""

    # Declared without values, because vLLM refuses to add attributes that its worker has.
    rank: int
    model_config: "ModelConfig"
    model_runner: "GPUModelRunner"
    reload_weights: Callable[..., None]

    def trace_weights(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> WorkerTrace:
        """Find where tensors of these names and shapes go in this worker, and whether they can be copied."""
        model = self.model_runner.get_model()
        self._trace = LoadTrace.of(model, shapes, dtype)
        checkpoint = CheckpointTensors(Path(self.model_config.model))
        foreign = tuple(name for name in shapes if name not in checkpoint)
        return WorkerTrace(
            trace=self._trace,
            foreign=foreign,
            reload_because=reload_reasons(model, self._trace, checkpoint),
        )

    def connect_weights(
        self, layout: WeightLayout, host_memory: HostMemory, is_copy: bool
    ) -> Sequence[StridedCopy]:
        """Map the receive buffer and plan this worker's copies out of it. Call after ``trace_weights``.

        If ``is_copy`` is false, vLLM loads every tensor whole and no copies are planned.
        """
        self._layout = layout
        self._images = received_images(host_memory.receive_buffer, layout)
        self._weights: GpuWeights | None = None
        if not is_copy:
            return ()
        copies = plan_copies(layout, self._trace.regions)
        self._weights = GpuWeights(self.model_runner.get_model(), worker_rank=self.rank)
        self._weights.plan(copies, host_memory)
        return copies

    def start_staging(self, share: HostShare) -> None:
        """Start to fill this worker's part of the shadow, given by its engine's share."""
        weights = self._weights
        if weights is not None:
            weights.take_share(share)
        self._staging = stage_in_thread(lambda: None if weights is None else weights.stage(self._images))

    def staging_done(self) -> bool:
        """Return whether this worker's part is complete; raise the error of staging, if any."""
        return self._staging.done() and self._staging.result() is None

    def swap_weights(self) -> None:
        """Install the version: copy it from the shadow or, without one, run vLLM's own loaders."""
        if self._weights is not None:
            self._weights.swap()
            return
        # The worker's method sets the current vLLM config; the runner's does not.
        self.reload_weights(weights_iterator=whole_tensors(self._layout, self._images))

    def watch_operators(self, names: Collection[str]) -> None:
        """Begin to watch operators."""
        self._watch = OperatorWatch(self.model_runner.get_model(), names)

    def operators_seen(self) -> dict[str, np.ndarray]:
        """Return what ``watch_operators`` has kept of the last forward pass, and end it."""
        return self._watch.end()
