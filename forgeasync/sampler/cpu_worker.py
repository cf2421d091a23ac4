"""vLLM's CPU worker with records of its choices, and weights that can be replaced under running sequences."""

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from forgeasync.sampler.cpu_capture import RecordingCPUModelRunner
from forgeasync.sampler.cpu_weights import CpuWeights, keep_linear_weights


class UpdatableCPUWorker(CPUWorker):
    """Given to vLLM as ``worker_cls``; its extra methods are called by ``collective_rpc``."""

    def init_device(self) -> None:
        super().init_device()
        # The class that vLLM builds here cannot be named from outside; the subclass adds no state to it.
        self.model_runner.__class__ = RecordingCPUModelRunner

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        keep_linear_weights()
        super().load_model(load_dummy_weights=load_dummy_weights)
        self._weights = CpuWeights(self.model_runner.get_model())

    def replace_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Replace every weight; whole tensors under their Hugging Face names."""
        self._weights.load(weights)

    def copy_parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters as last loaded, experts unpacked."""
        return {name: tensor.clone() for name, tensor in self._weights.parameters().items()}
