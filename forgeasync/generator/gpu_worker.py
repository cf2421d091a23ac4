"""Extends vLLM's GPU worker to take weights under running sequences, as its ``worker_extension_cls``.

Written against vLLM 0.32. Staging runs in a thread of its own, so that the engine goes on stepping;
``staging_done`` is polled.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forgeasync.generator.gpu_weights import GpuWeights
from forgeasync.generator.host_memory import HostMemory
from forgeasync.generator.staging_thread import StagingThread
from forgeasync.generator.weight_route import reload_reasons
from forgeasync.generator.workarounds.load_trace import WorkerTrace, trace_load
from forgeasync.models import CheckpointTensors
from forgeasync.weights import (
    HostShare,
    StridedCopy,
    WeightLayout,
    plan_copies,
    received_images,
    whole_tensors,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class UpdatableGPUWorker:
    """The methods of ``UpdatableCPUWorker`` for GPUs."""

    # Of the worker that vLLM adds these methods to; an attribute with a value would be refused there.
    rank: int
    model_config: "ModelConfig"
    model_runner: "GPUModelRunner"
    reload_weights: Callable[..., None]

    def trace_weights(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> WorkerTrace:
        """Find where tensors of these names and shapes go in this worker, and if copies are right there."""
        model = self.model_runner.get_model()
        self._trace = trace_load(model, shapes, dtype)
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
        """Map the receive buffer and plan this worker's copies out of it; after ``trace_weights``.

        Without copies (``is_copy``) vLLM loads every tensor whole.
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
        """Begin to fill this worker's part of the shadow, by its engine's share, from the receive buffer."""
        weights = self._weights
        if weights is not None:
            weights.take_share(share)
        self._staging = StagingThread(lambda: None if weights is None else weights.stage(self._images))

    def staging_done(self) -> bool:
        """Whether this worker's part is complete; raises what went wrong."""
        return self._staging.is_done()

    def swap_weights(self) -> None:
        """Put the version in place: copies out of the shadow or, without one, vLLM's own loaders."""
        if self._weights is not None:
            self._weights.swap()
            return
        # The worker's own method sets the current config; the runner's does not.
        self.reload_weights(weights_iterator=whole_tensors(self._layout, self._images))
