"""Connects an engine with the trainer's weights, as a generator's setup says."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forgeasync.actors.generator_setup import GeneratorSetup
from forgeasync.models import expected_shapes
from forgeasync.weights import TORCH_DTYPES, HostShare, Transport, WeightLayout

if TYPE_CHECKING:
    from forgeasync.generator import GeneratorEngine, WeightReceiver


async def connect_receiver(
    engine: "GeneratorEngine",
    setup: GeneratorSetup,
    *,
    layout: WeightLayout,
    transports: Mapping[int, Transport],
    folder: Path,
    share: HostShare,
    is_joining: bool,
) -> "WeightReceiver":
    """Plan how versions of a layout get into an engine, by a receive buffer in ``folder``.

    Raises:
        ValueError: trainer and engine do not have the same tensors.
    """
    # They import vLLM, which takes 10 s.
    from forgeasync.generator import AdapterBase, HostMemory, WeightReceiver

    base = None
    if setup.lora is not None:
        base = AdapterBase(
            folder=setup.model_path,
            shapes=expected_shapes(setup.facts),
            dtype=TORCH_DTYPES[setup.section.dtype],
            scaling=setup.lora.alpha / setup.lora.rank,
        )
    return await WeightReceiver.connect(
        engine,
        layout=layout,
        transports=transports,
        host_memory=HostMemory(
            receive_buffer=folder / "receive-buffer",
            shadow=setup.weights.shadow,
            share=share,
            is_joining=is_joining,
        ),
        delta=setup.weights.delta,
        base=base,
    )
