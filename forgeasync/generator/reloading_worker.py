"""Extends vLLM's GPU worker to take weights from a receive buffer, as its ``worker_extension_cls``.

GPU kernels keep some parameters in orders of their own, which vLLM's ``reload_weights`` restores and makes
again: whole tensors go through it, one at a time, from host memory. Written against vLLM 0.32; not run yet on
a GPU.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from forgeasync.weights.fetcher import received_images
from forgeasync.weights.layout import WeightLayout, whole_tensors


class ReloadingWorker:
    """The methods of ``UpdatableCPUWorker`` for GPUs; here the swap itself reads the receive buffer."""

    def trace_weights(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        """Return no trace: every tensor is given to vLLM's own loaders whole."""

    def connect_weights(self, layout: WeightLayout, receive_buffer: Path) -> None:
        """Map the receive buffer."""
        self._layout = layout
        self._images = received_images(receive_buffer, layout)

    def start_staging(self) -> None:
        """Do nothing: a second copy of the weights would not fit on most GPUs."""

    def staging_done(self) -> bool:
        return True

    def swap_weights(self) -> None:
        """Load every tensor of the receive buffer."""
        self.model_runner.reload_weights(weights_iterator=whole_tensors(self._layout, self._images))
