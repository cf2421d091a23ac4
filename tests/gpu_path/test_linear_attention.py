"""Qwen3.5 with the kernels of GPUs: flash-linear-attention's in the trainer, vLLM's in an engine.

Triton's kernels are interpreted, in float32, and compared with those that the trainer has on CPUs.
"""

import asyncio
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from forgeasync.config import ActivationCheckpointing, Dtype, GeneratorSection, SamplingSection, ShadowMemory
from forgeasync.models import read_model_facts
from forgeasync.rollouts import CaptureSpec, Rollout
from forgeasync.trainer import TrainingSequence, pack_row
from tests.support.engines import sample_all, start_engine
from tests.support.families import write_family
from tests.support.gpu_runner import run_on_gpu_runner
from tests.support.processes import run_ranks
from tests.support.trainers import make_trainer, named_tensors, plain_sequence
from tests.support.weight_service import FolderPublisher
from tests.support.without_data import FLA

pytestmark = pytest.mark.exhaustive

HYBRID = "qwen3_5"


def _kernels_of_gpus() -> ExitStack:
    """Gives the layers of this process what they take on GPUs."""
    assert FLA.exists(), f"{FLA} is missing: make .venv-fla"
    sys.path.append(str(FLA))
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    patches = ExitStack()
    patches.enter_context(mock.patch("forgeasync.models.qwen3_5.DEVICE_TYPE", "cuda"))
    rule = "torchtitan.models.qwen3_5.model._fla_chunk_gated_delta_rule"
    patches.enter_context(mock.patch(rule, chunk_gated_delta_rule))
    return patches


def _computed(
    folder: Path, sequences: list[TrainingSequence]
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Log-probabilities of a row and the gradients of their sum, with the kernels of CPUs and of GPUs."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.autograd.set_multithreading_enabled(False)
    found = []
    for is_gpu in (False, True):
        trainer = make_trainer(folder, activation_checkpointing=ActivationCheckpointing.NONE)
        with _kernels_of_gpus() if is_gpu else nullcontext():
            logprobs_T = trainer.logprobs(pack_row(sequences))
            logprobs_T.sum().backward()
        found.append((logprobs_T.detach(), named_tensors(trainer, gradients=True)))
    dist.destroy_process_group()
    return found


def test_the_trainer_computes_the_same_with_kernels_of_gpus(tmp_path: Path) -> None:
    """A chunk has 64 tokens: sequences of one, of a few, and of several that end within one."""
    folder = write_family(tmp_path / "model", HYBRID)
    vocab_size = read_model_facts(str(folder)).vocab_size
    rng = np.random.default_rng(0)
    sequences = [
        plain_sequence(*np.split(rng.integers(0, vocab_size, length).astype(np.int32), [1]))
        for length in (2, 70, 9)
    ]
    (wanted, gradients), (found, others) = run_on_gpu_runner(_computed, folder, sequences)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert float((others[name] - gradient).norm() / gradient.norm()) < 2e-3, name


async def _sampled(dtype: Dtype, before: Path, after: Path, out: Path) -> tuple[list[Rollout], str]:
    """Rollouts of versions 0 and 1, and how the engine takes the latter."""
    _give_layers_of_gpus()
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "kv_cache_gib": 0.02}
    generator = GeneratorSection(dtype=dtype, **sizes)
    engine = await start_engine(before, generator, records=CaptureSpec(routing=False, kept_tokens=True))
    publisher = FolderPublisher(before, out, getattr(torch, dtype.value))
    receiver = await publisher.connect(engine, out / "receive-buffer", shadow=ShadowMemory.HOST)
    rng = np.random.default_rng(0)
    # The longest prompt is computed in parts, beside others' decoding.
    prompts = [rng.integers(3, 15, num).astype(np.int32) for num in (1, 9, 70)]
    sampling = SamplingSection(max_response_tokens=5)
    rollouts = await sample_all(engine, prompts, sampling, num_samples=2)
    await receiver.begin(publisher.stage(1, 1, load_file(after / "model.safetensors")))
    await receiver.stage()
    await receiver.finish()
    rollouts += await sample_all(engine, prompts, sampling, num_samples=1)
    engine.shutdown()
    return rollouts, str(receiver.route)


def _give_layers_of_gpus() -> None:
    """Let vLLM's layers with states choose as on a GPU. Its rule for prompts refuses float32, for speed."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as linear
    from vllm.third_party.flash_linear_attention.ops.chunk import ChunkGatedDeltaRuleFunction

    from forgeasync.generator.workarounds.vllm_process import compute_qwen3_5

    compute_qwen3_5(is_cpu=False)
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layers

    def rule(
        *, k: torch.Tensor, initial_state: torch.Tensor, cu_seqlens: torch.Tensor, **others: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, v, g, beta = (others[name] for name in ("q", "v", "g", "beta"))
        scale, rest = k.shape[-1] ** -0.5, (others["chunk_indices"], others["chunk_offsets"])
        return ChunkGatedDeltaRuleFunction.apply(
            q, k, v, g, beta, scale, initial_state, True, cu_seqlens, *rest, False, None
        )

    # Layers of GPUs keep their weights; the CPU build's pack them.
    ops._supports_onednn = False
    ops.causal_conv1d_weight_pack = lambda weight: weight.unsqueeze(1)
    linear.check_cpu_sgl_kernel = lambda *_: False
    kinds = ("is_cpu", "is_xpu", "is_rocm", "is_cuda", "is_cuda_alike")
    layers.current_platform = SimpleNamespace(
        **dict.fromkeys(kinds, lambda: False), current_device=lambda: "cpu"
    )
    layers.fla_chunk_gated_delta_rule = rule


def _on_an_engine(*arguments: Any) -> tuple[list[Rollout], str]:
    return asyncio.run(_sampled(*arguments))


def _logprobs(folders: tuple[Path, Path], rollouts: list[Rollout]) -> list[torch.Tensor]:
    trainers = [make_trainer(folder) for folder in folders]
    with torch.no_grad():
        return [
            trainers[one.version_spans[0].version].logprobs(
                pack_row([plain_sequence(one.prompt_ids_P, one.response_ids_T)])
            )
            for one in rollouts
        ]


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_an_engine_samples_from_the_trainers_distribution(tmp_path: Path, dtype: Dtype) -> None:
    """In bfloat16, as on GPUs, decays are published so too; only float32 can be compared closely."""
    folders = (write_family(tmp_path / "0", HYBRID, seed=0), write_family(tmp_path / "1", HYBRID, seed=1))
    rollouts, route = run_on_gpu_runner(_on_an_engine, dtype, *folders, tmp_path)
    assert route.startswith("weights are copied into"), route
    assert {span.version for one in rollouts for span in one.version_spans} == {0, 1}
    if dtype is Dtype.BFLOAT16:
        return
    for rollout, logprobs_T in zip(rollouts, run_ranks(1, _logprobs, folders, rollouts)[0], strict=True):
        np.testing.assert_allclose(rollout.logprobs_T, logprobs_T.numpy(), atol=4e-4)
