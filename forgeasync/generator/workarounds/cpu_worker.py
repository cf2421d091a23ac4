"""vLLM's CPU worker with records of its choices, and weights that change under running sequences."""

from collections.abc import Mapping, Sequence

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from forgeasync.generator.host_memory import HostMemory
from forgeasync.generator.staging_thread import StagingThread
from forgeasync.generator.workarounds.cpu_capture import RecordingCPUModelRunner
from forgeasync.generator.workarounds.cpu_weights import CpuWeights, keep_linear_weights
from forgeasync.generator.workarounds.load_trace import WorkerTrace, trace_load
from forgeasync.generator.workarounds.served_adapters import allow_dense_adapters_of_moe
from forgeasync.weights import HostShare, StridedCopy, WeightLayout, plan_copies, received_images


class UpdatableCPUWorker(CPUWorker):
    """Given to vLLM as ``worker_cls``; its extra methods are called by ``collective_rpc``.

    Staging runs in a thread of its own, so that the engine goes on stepping; ``staging_done`` is polled.
    """

    def init_device(self) -> None:
        super().init_device()
        # The class that vLLM builds here cannot be named from outside; the subclass adds no state to it.
        self.model_runner.__class__ = RecordingCPUModelRunner

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        keep_linear_weights()
        if self.lora_config is not None:
            allow_dense_adapters_of_moe()
        super().load_model(load_dummy_weights=load_dummy_weights)
        self._weights = CpuWeights(self.model_runner.get_model())

    def trace_weights(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> WorkerTrace:
        """Find where tensors of these names and shapes go in this worker."""
        self._trace = trace_load(self.model_runner.get_model(), shapes, dtype)
        return WorkerTrace(trace=self._trace)

    def connect_weights(
        self, layout: WeightLayout, host_memory: HostMemory, is_copy: bool
    ) -> Sequence[StridedCopy]:
        """Map the receive buffer and plan this worker's copies out of it; after ``trace_weights``."""
        assert is_copy, "this worker packs for its kernels itself"
        self._images = received_images(host_memory.receive_buffer, layout)
        copies = plan_copies(layout, self._trace.regions)
        self._weights.plan(copies)
        return copies

    def start_staging(self, share: HostShare) -> None:
        """Begin to fill the shadow parameters, all of them this engine's own, from the receive buffer."""
        self._staging = StagingThread(lambda: self._weights.stage(self._images))

    def staging_done(self) -> bool:
        """Whether the shadows are complete; raises what went wrong."""
        return self._staging.is_done()

    def swap_weights(self) -> None:
        """Make the shadows the model's parameters."""
        self._weights.swap()

    def copy_parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the live parameters, experts unpacked."""
        return self._weights.parameters()
