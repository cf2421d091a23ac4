"""Adapters that vLLM serves itself: changed in place between two steps, for running sequences too. vLLM 0.32.

An engine serves one adapter, "policy", which every request names; it starts as zero, so that version 0 is the
base model and a sequence that crosses the first update has an adapter to change. vLLM reads adapters from
folders only: a version is written to one in shared memory, beside decoding, and read at the swap.

The CPU build has no kernel for adapters of experts and refuses MoE models once adapters are on, whatever
their targets. There, attention projections are served (``allow_dense_adapters_of_moe``), and anything else is
merged (``forgeasync.generator.adapter_merger``). That can go when it selects its MoE kernel by what is
adapted.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import save_file
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe import layer as moe_layer
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore

from forgeasync.config.model import LoraSection

ATTENTION_TARGETS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})

_ADAPTER_ID = 1


def can_serve(lora: LoraSection) -> bool:
    """Whether this build of vLLM serves adapters of these targets."""
    return not current_platform.is_cpu() or ATTENTION_TARGETS.issuperset(lora.targets)


def engine_rank(rank: int) -> int:
    """The rank that the engine allocates: vLLM knows a few."""
    return min(choice for choice in get_args(MaxLoRARanks) if choice >= rank)


def allow_dense_adapters_of_moe() -> None:
    """Call before the model is built: its experts then choose their kernel as without adapters."""
    config = moe_layer.FusedMoEConfig

    class WithoutAdapters(config):  # type: ignore[misc, valid-type]
        def __post_init__(self) -> None:
            self.is_lora_enabled = False
            super().__post_init__()

    moe_layer.FusedMoEConfig = WithoutAdapters


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSetup:
    """Everything that an engine that serves adapters is started with."""

    lora: LoraSection
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the base model's tensors, by name."""
    folder: Path
    """In shared memory of the engine's host; made here."""


class ServedAdapter:
    """The versions of an engine's one adapter, as folders."""

    def __init__(self, setup: AdapterSetup) -> None:
        self._setup = setup
        setup.folder.mkdir()
        self._before: Path | None = None

    @property
    def request(self) -> LoRARequest:
        """The adapter request that every request of the engine carries."""
        assert self._before is not None, "no version was written"
        return LoRARequest("policy", _ADAPTER_ID, str(self._before))

    def write_zero(self) -> LoRARequest:
        """The adapter that changes nothing."""
        tensors = {}
        for name, shape in self._setup.shapes.items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in self._setup.lora.targets:
                stem = f"base_model.model.{module}"
                tensors[f"{stem}.lora_A.weight"] = torch.zeros(self._setup.lora.rank, shape[1])
                tensors[f"{stem}.lora_B.weight"] = torch.zeros(shape[0], self._setup.lora.rank)
        return self.write(0, tensors)

    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> LoRARequest:
        """A version's folder; the one before it is not needed any more."""
        lora = self._setup.lora
        folder = self._setup.folder / str(version)
        folder.mkdir(exist_ok=True)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "adapter_model.safetensors",
        )
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": list(lora.targets),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        if self._before is not None and self._before != folder:
            shutil.rmtree(self._before)
        self._before = folder
        return LoRARequest("policy", _ADAPTER_ID, str(folder), load_inplace=True)


def install(core: EngineCore, request: LoRARequest) -> None:
    """Load a version over the one before, between two steps."""
    loaded = core.add_lora(request)
    assert loaded, f"vLLM did not load {request}"
