"""What of vLLM 0.32 is changed once in a process, before its first engine. Can go when vLLM does all of it.

- The file by which the workers of one engine find each other. vLLM calls it ``/tmp/vllm_dist_<random>``,
  never removes it, and gives the same name to the shared memory of its collectives on CPUs
  (``/dev/shm/vllm_dist_...``), which stays when the workers are killed. With the run's mark in the name the
  end of the run, or a later start, removes both.
- How the CPU build counts the tokens that are at least as likely as a sampled one. vLLM compiles this one
  comparison with inductor, which takes an engine 60 MiB and its first steps a second.
"""

import tempfile
from uuid import uuid4

import torch
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.sample import sampler

from forgeasync.faults import own_prefix


def adapt_process() -> None:
    """Change vLLM for all engines that this process builds from now on."""
    for module in (multiproc_executor, uniproc_executor):
        assert hasattr(module, "get_file_store_init_method"), "written against vLLM 0.32"
    multiproc_executor.get_file_store_init_method = _init_method
    uniproc_executor.get_file_store_init_method = _init_method
    if current_platform.is_cpu():
        assert hasattr(sampler, "batched_count_greater_than"), "written against vLLM 0.32"
        # vLLM calls it by place, so that the names of its parameters do not matter.
        sampler.batched_count_greater_than = count_at_least  # type: ignore[assignment]


def _init_method() -> str:
    prefix = own_prefix()
    if prefix is None:
        return str(get_file_store_init_method())
    return f"file://{tempfile.gettempdir()}/{prefix}{uuid4().hex}"


def count_at_least(logprobs_BV: torch.Tensor, bounds_B1: torch.Tensor) -> torch.Tensor:
    """How many of each row are at least as large as its bound, int64 [B]."""
    return (logprobs_BV >= bounds_B1).sum(-1)
