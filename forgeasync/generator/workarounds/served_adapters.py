"""LoRA adapters that vLLM serves, updated in place between two steps while sequences run. For vLLM 0.32.

An engine serves one adapter, "policy", which every request names. It starts as zero, so version 0 is the base
model, and a sequence that runs during the first update has an adapter to change. vLLM reads adapters only
from folders: a version is written to a folder in shared memory while the engine decodes, and read at the
swap.

vLLM silently skips modules of an adapter that none of its wrapped layers uses. All experts of a layer are one
wrapped layer, ``experts``, which no projection's name matches, and which accepts adapters of all three
projections or none. So ``engine_modules`` names it, ``write`` adds zeros for projections without an adapter,
and ``install`` compares what each worker has applied with what was written.

The CPU build has no kernel for adapters of experts and refuses MoE models if adapters are enabled, whatever
their targets. There, attention projections are served (``allow_dense_adapters_of_moe``), and all other
adapters are merged (``forgeasync.generator.engine_weights``). That can go when it selects its MoE kernel by
the adapted modules.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.fused_moe import layer as moe_layer
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.worker_base import WorkerBase

from forgeasync.config import EXPERT_TARGETS, LoraSection

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager

ATTENTION_TARGETS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})

MAX_NAMES = 5
"""Maximum number of names in an error message."""

_ADAPTER_ID = 1

_PREFIX = "base_model.model."

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
"""vLLM's names of fused layers, by projection."""

_EXPERT = re.compile(r"\.experts\.\d+\.")


class AdapterNotApplied(RuntimeError):
    """vLLM has loaded an adapter but does not compute with all of it."""


def can_serve(lora: LoraSection) -> bool:
    """Return whether this build of vLLM serves adapters with these targets."""
    return not current_platform.is_cpu() or ATTENTION_TARGETS.issuperset(lora.targets)


def engine_rank(rank: int) -> MaxLoRARanks:
    """Return the smallest rank that vLLM supports and that is at least ``rank``."""
    return min(choice for choice in get_args(MaxLoRARanks) if choice >= rank)


def allow_dense_adapters_of_moe() -> None:
    """Make experts choose their kernel as without adapters. Call before the model is built."""

    class WithoutAdapters(moe_layer.FusedMoEConfig):
        def __post_init__(self) -> None:
            self.is_lora_enabled = False
            super().__post_init__()

    # Replaces vLLM's own class.
    moe_layer.FusedMoEConfig = WithoutAdapters  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSetup:
    """Setup of an engine that serves adapters."""

    lora: LoraSection
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the base model's tensors, by name."""
    folder: Path
    """Folder to create, in shared memory of the engine's host."""

    def modules(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the base model's linear layers that have adapters in the engine."""
        targets = set(self.lora.targets)
        adapts_experts = bool(targets & set(EXPERT_TARGETS))
        for name, shape in self.shapes.items():
            module = name.removesuffix(".weight")
            is_of_expert = _EXPERT.search(module) is not None
            if module.rpartition(".")[2] in targets or (is_of_expert and adapts_experts):
                yield module, shape


def engine_modules(setup: AdapterSetup) -> list[str]:
    """Return vLLM's names of the layers that it must wrap for these adapters."""
    names = {_FUSED.get(target, target) for target in setup.lora.targets}
    if any(_EXPERT.search(module) for module, _ in setup.modules()):
        names.add("experts")
    return sorted(names)


class ServedAdapter:
    """Writes the versions of an engine's adapter to folders."""

    def __init__(self, setup: AdapterSetup) -> None:
        self._setup = setup
        setup.folder.mkdir()
        self._before: Path | None = None
        rank = setup.lora.rank
        self._shapes: dict[str, tuple[int, int]] = {}
        for module, (num_outputs, num_inputs) in setup.modules():
            self._shapes[f"{_PREFIX}{module}.lora_A.weight"] = (rank, num_inputs)
            self._shapes[f"{_PREFIX}{module}.lora_B.weight"] = (num_outputs, rank)

    @property
    def request(self) -> LoRARequest:
        """The adapter request that every request of the engine has."""
        assert self._before is not None, "no version was written"
        return LoRARequest("policy", _ADAPTER_ID, str(self._before))

    def write_zero(self) -> LoRARequest:
        """Write version 0, the adapter that changes nothing."""
        return self._write(0, {})

    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> LoRARequest:
        """Write a version to a folder and remove the previous version's folder."""
        targets = self._setup.lora.targets
        expected = {name for name in self._shapes if name.split(".")[-3] in targets}
        differences = sorted(expected ^ tensors.keys())
        assert not differences, f"missing or adapting no target: {differences[:MAX_NAMES]}"
        return self._write(version, tensors)

    def _write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> LoRARequest:
        """Write a version, with zeros for missing tensors."""
        lora = self._setup.lora
        folder = self._setup.folder / str(version)
        folder.mkdir(exist_ok=True)
        save_file(
            {
                name: tensors[name].contiguous() if name in tensors else torch.zeros(shape)
                for name, shape in self._shapes.items()
            },
            folder / "adapter_model.safetensors",
        )
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": sorted({name.split(".")[-3] for name in self._shapes}),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        if self._before is not None and self._before != folder:
            shutil.rmtree(self._before)
        self._before = folder
        return LoRARequest("policy", _ADAPTER_ID, str(folder), load_inplace=True)


def install(core: EngineCore, request: LoRARequest) -> None:
    """Load a version in place of the previous one, between two steps.

    Raises:
        AdapterNotApplied: A worker of the engine computes without a part of it; the message names the
            modules.
    """
    loaded = core.add_lora(request)
    assert loaded, f"vLLM did not load {request}"
    for rank, missing in enumerate(core.collective_rpc(not_applied, args=(request.lora_path,))):
        if missing:
            rest = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
            raise AdapterNotApplied(
                f"worker {rank} of the engine does not apply the adapters of "
                f"{', '.join(missing[:MAX_NAMES])}{rest}"
            )


def not_applied(worker: WorkerBase, folder: str) -> list[str]:
    """Return the modules of the adapter in ``folder`` that this worker does not compute with.

    Call after the worker has loaded it. A module is applied on three conditions: its layer, itself or fused
    with others, is wrapped; it is in the loaded adapter; the adapter is in the slot that requests use.
    """
    runner = worker.model_runner
    # vLLM declares the model runner as a module or None.
    manager: LoRAModelManager = runner.lora_manager._adapter_manager  # type: ignore[union-attr, assignment]
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    renames = None if mapper is None else mapper.get_rename_mapper()
    with safe_open(Path(folder) / "adapter_model.safetensors", framework="pt") as tensors:
        written = {parse_fine_tuned_lora_name(name, renames)[0] for name in tensors.keys()}
    if _ADAPTER_ID not in manager.lora_index_to_id:
        return sorted(written)
    layer_of = {part: layer for layer, parts in manager.packed_modules.items() for part in parts}
    adapter = manager.get_adapter(_ADAPTER_ID)
    assert adapter is not None, "it is in a slot"
    applied = manager.modules.keys() & adapter.loras.keys()
    return sorted(module for module in written if layer_of.get(module, module) not in applied)
