"""Import this before vllm: its GPU model runner then runs here, Triton's kernels interpreted. For vLLM 0.32.

vLLM's newer model runner ("V2") is the one that GPUs have; the CPU build has it too, as a subclass without a
line about computing, and only lacks Triton. Triton's interpreter needs no device, but vLLM counts active
drivers before it takes Triton for usable.

This module changes the whole process that imports it.
"""

import os
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import SupportsIndex

assert not {"vllm", "triton"} & sys.modules.keys(), "who imported them has set up Triton in another way"

os.environ.update(
    TRITON_INTERPRET="1",
    CUDA_VISIBLE_DEVICES="",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_CPU_CI_ENV="1",
)

import triton.backends  # noqa: E402


class _Driver:
    """What kernels' modules ask when they are imported."""

    is_active = staticmethod(lambda: True)
    get_current_target = staticmethod(lambda: SimpleNamespace(backend="cpu"))


triton.backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)

from triton import language  # noqa: E402
from triton.runtime import autotuner, interpreter  # noqa: E402

_one_kernel = threading.RLock()
_run = interpreter.GridExecutor.__call__
_tune = autotuner.Autotuner.__init__
_dot = interpreter.InterpreterBuilder.create_dot


class _Index(int):
    """What loops of compiled kernels count with: it can be cast."""

    def to(self, _: object) -> "_Index":
        return self


def _call(name: str, *arguments: object, **named: object) -> object:
    return getattr(language, name)(*arguments, **named)


def _counted(*bounds: SupportsIndex) -> list[_Index]:
    return [_Index(one) for one in range(*bounds)]


def _run_alone(self: interpreter.GridExecutor, *arguments: object, **keywords: object) -> object:
    """The interpreter changes ``triton.language`` while a kernel runs: engines of one process take turns."""
    with _one_kernel:
        known = self.fn.__globals__
        known["range"] = _counted
        # It replaces functions in ``triton.language``, not what a module has under a name of its own.
        for name, value in list(known.items()):
            if language.core.is_builtin(value):
                known[name] = partial(_call, value.__name__)
        return _run(self, *arguments, **keywords)


def _values(block: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """A block of bfloat16 in float32; the interpreter would multiply its bits as whole numbers."""
    if block.dtype.scalar != language.bfloat16:
        return block
    return interpreter.TensorHandle((block.data.astype("u4") << 16).view("f4"), language.float32)


def _dot_values(
    self: object, a: interpreter.TensorHandle, b: interpreter.TensorHandle, *rest: object
) -> interpreter.TensorHandle:
    return _dot(self, _values(a), _values(b), *rest)


def _take_first(
    self: autotuner.Autotuner, kernel: object, names: object, configs: list, *rest: object, **named: object
) -> None:
    """Without a device there are no times to compare."""
    _tune(self, kernel, names, configs[:1], *rest, **named)


interpreter.GridExecutor.__call__ = _run_alone
interpreter.InterpreterBuilder.create_dot = _dot_values
autotuner.Autotuner.__init__ = _take_first
