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


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels are activated, where all are installed; by default on a Hopper."""
    names: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("torchtitan.models.common.attention.activate_flash_attention_impl", names.append)
    return names


@pytest.mark.parametrize(("capability", "wanted"), [((9, 0), "FA3"), ((10, 0), "FA4")])
def test_an_installed_kernel_is_taken(
    monkeypatch: pytest.MonkeyPatch, activated: list[str], capability: tuple[int, int], wanted: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    trainer_model.build_meta_model(FACTS)
    assert set(activated) == {wanted}


@pytest.mark.parametrize("choice", FlashAttention)
def test_the_trainers_section_decides(
    monkeypatch: pytest.MonkeyPatch, activated: list[str], choice: FlashAttention
) -> None:
    """On a Hopper with FA3 and FA4 installed; runtime/host_checks.py refuses what does not fit a GPU."""
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
    expected = {"auto": {"FA3"}, "FA2": set(), "FA3": {"FA3"}, "FA4": {"FA4"}}
    assert set(activated) == expected[choice.value]
