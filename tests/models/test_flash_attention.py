"""Models for Hopper and Blackwell are built with what is installed; no GPU, the capability is pretended."""

import importlib.util
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl
from torchtitan.models.common.attention import VarlenAttention

from forgeasync.config import FlashAttention, OptimizerSection, TrainerSection
from forgeasync.models import SHIPPED_MODELS, read_model_facts
from forgeasync.models.workarounds import titan_utils
from forgeasync.trainer import model as trainer_model

FACTS = read_model_facts(str(SHIPPED_MODELS / "Qwen--Qwen3-30B-A3B"))


@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    titan_utils._is_installed.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(trainer_model, "DEVICE_TYPE", "cuda")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_without_newer_kernels_attention_is_flash_attention_2(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    model = trainer_model.build_meta_model(FACTS)
    kernels = {type(module) for module in model.modules() if "Attention" in type(module).__name__}
    assert any(issubclass(kernel, VarlenAttention) for kernel in kernels)
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("capability", "choice", "wanted"),
    [
        ((9, 0), FlashAttention.AUTO, {"FA3"}),
        ((10, 0), FlashAttention.AUTO, {"FA4"}),
        ((9, 0), FlashAttention.FA2, set()),
        ((9, 0), FlashAttention.FA3, {"FA3"}),
        ((9, 0), FlashAttention.FA4, {"FA4"}),
    ],
)
def test_where_all_kernels_are_installed_the_trainers_section_decides(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    choice: FlashAttention,
    wanted: set[str],
) -> None:
    """On Hoppers and a Blackwell; runtime/host_checks.py refuses what does not fit a GPU."""
    activated: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("torchtitan.models.common.attention.activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(titan_utils, "_choice", FlashAttention.AUTO)

    class Built(Exception):
        pass

    def build(*arguments: object, **options: object) -> None:
        with torch.device("meta"):
            trainer_model.titan_config(FACTS).layers[0].build()
        raise Built

    # Before the model is sharded, which takes a process group.
    monkeypatch.setattr("torchtitan.models.common.decoder.Decoder.Config.update_from_config", build)
    section = TrainerSection(
        tokens_per_row=64, optimizer=OptimizerSection(learning_rate=1e-3), flash_attention=choice
    )
    with pytest.raises(Built):
        trainer_model.build_parallel_model(FACTS, section, parallel_dims=Mock())
    assert set(activated) == wanted
