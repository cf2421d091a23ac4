"""``fidelity: bitwise`` on GPUs: trainer and engine call the same kernels, and get the same bits of them.

Both run vLLM's batch-invariant mode in bfloat16. Triton's kernels are interpreted, and CUDA's operators are
stand-ins (tests/support/invariant_gpu.py). So this shows that both sides call what they should with the same
constants, and that neither batches nor packing change the order of a kernel's sums; not that a GPU does.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forgeasync.config import Dtype, GeneratorSection, ParallelSection, SamplingSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import CaptureSpec, Rollout
from tests.generator.conftest import make_prompts
from tests.support.engines import sample_all, start_engine
from tests.support.families import write_family
from tests.support.gpu_runner import run_on_gpu_runner
from tests.support.invariant_gpu import Call, pretend
from tests.support.trainers import make_trainer
from tests.trainer.test_bitwise import _rows

SAMPLING = SamplingSection(temperature=0.8, top_k=9, max_response_tokens=4)
GENERATOR = GeneratorSection(
    dtype=Dtype.BFLOAT16,
    max_num_seqs=8,
    # Prompts are computed in parts.
    max_num_batched_tokens=24,
    kv_cache_gib=0.002,
    batch_invariant=True,
)

BESIDE_THE_MODEL = ("vllm.v1.worker.gpu.", "vllm.model_executor.determinism.batch_invariant._softmax_kernel")
"""Beginnings of the names of kernels that prepare batches, cut the vocabulary and draw."""


async def _sample(folder: Path) -> tuple[list[Rollout], set[Call]]:
    calls = pretend()
    records = CaptureSpec(routing=read_model_facts(str(folder)).num_experts > 0, kept_tokens=True)
    engine = await start_engine(folder, GENERATOR, records=records)
    prompts = make_prompts(engine.vocab_size, (3, 40), num_shared=0)
    rollouts = await sample_all(engine, prompts, SAMPLING, num_samples=2)
    engine.shutdown()
    return rollouts, calls


def _step(folder: Path, rollouts: list[Rollout]) -> tuple[dict[str, float], set[Call]]:
    """A step's metrics."""
    calls = pretend()
    from forgeasync.trainer import generator_forward

    generator_forward.DEVICE_TYPE = "cuda"
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.autograd.set_multithreading_enabled(False)
    trainer = make_trainer(
        folder,
        ParallelSection(),
        dtype=Dtype.BFLOAT16,
        tokens_per_row=512,
        temperature=SAMPLING.temperature,
        is_bitwise=True,
    )
    metrics = trainer.train_step(_rows(rollouts, share=True, per_row=4, rank=0, num_ranks=1)).metrics
    dist.destroy_process_group()
    return metrics, calls


@pytest.mark.parametrize("variant", ["qwen3_moe", pytest.param("llama3_rope", marks=pytest.mark.exhaustive)])
def test_trainer_and_engine_compute_with_the_same_kernels(tmp_path: Path, variant: str) -> None:
    folder = write_family(tmp_path / "model", variant)
    rollouts, of_engine = run_on_gpu_runner(_sample, folder)
    assert all(np.isfinite(one.logprobs_T).all() and one.logprobs_T.any() for one in rollouts)
    metrics, of_trainer = run_on_gpu_runner(_step, folder, rollouts)
    assert of_trainer <= of_engine
    others = {call for call in of_engine - of_trainer if not call.name.startswith(BESIDE_THE_MODEL)}
    assert not others
    assert metrics["mismatch/logprob_abs_max"] == 0.0
