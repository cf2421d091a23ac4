"""Import this before vllm: its GPU model runner then runs here, Triton's kernels interpreted. For vLLM 0.32.

vLLM's newer model runner ("V2") is the one that GPUs have; the CPU build has it too, as a subclass without a
line about computing, and only lacks Triton. Triton's interpreter needs no device, but vLLM counts active
drivers before it takes Triton for usable.

This module changes the whole process that imports it.
"""

import os
import sys
import threading
from types import SimpleNamespace

assert not {"vllm", "triton"} & sys.modules.keys(), "who imported them has set up Triton in another way"

os.environ.update(
    TRITON_INTERPRET="1",
    CUDA_VISIBLE_DEVICES="",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_CPU_CI_ENV="1",
)

import triton.backends  # noqa: E402

_driver = SimpleNamespace(is_active=lambda: True)
triton.backends.backends["cpu"] = SimpleNamespace(driver=_driver, compiler=None)

from triton.runtime import interpreter  # noqa: E402

_one_kernel = threading.RLock()
_run = interpreter.GridExecutor.__call__


def _run_alone(self: object, *arguments: object, **keywords: object) -> object:
    """The interpreter changes ``triton.language`` while a kernel runs: engines of one process take turns."""
    with _one_kernel:
        return _run(self, *arguments, **keywords)


interpreter.GridExecutor.__call__ = _run_alone
