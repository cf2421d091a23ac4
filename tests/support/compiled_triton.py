"""Compiles Triton kernels for GPUs that this machine does not have, with the ptxas of the Triton package.

Triton's interpreter and compiler exclude each other within a process: ``record_launches`` belongs in one of
``run_on_gpu_runner``, ``Compiler`` in one of ``run_apart``. For Triton 3.7.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor as the compiler sees it."""

    dtype: torch.dtype
    is_aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.is_aligned else 1


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel; integers and constants have the launch's own values."""

    module: str
    kernel: str
    arguments: tuple[object, ...]
    named: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The result for one kernel and chip."""

    kernel: str
    arch: int
    shared_bytes: int = 0
    error: str = ""


def record_launches(*, passed_over: tuple[str, ...]) -> set[Launch]:
    """Return a set that gets the launches of interpreted kernels.

    The kernels still run, except those in modules whose names begin with one of ``passed_over``.
    """
    from triton.runtime.interpreter import GridExecutor

    found: set[Launch] = set()
    run = GridExecutor.__call__

    def record(self: GridExecutor, *arguments: object, **named: object) -> None:
        described = tuple(map(_describe, arguments))
        constants = tuple((name, _describe(value)) for name, value in named.items())
        module = self.fn.__globals__["__name__"]
        found.add(Launch(module, self.fn.__name__, described, constants))
        if not module.startswith(passed_over):
            run(self, *arguments, **named)

    GridExecutor.__call__ = record
    return found


def _describe(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    # Tensors without data are those that an allocator returns.
    has_data = value.device.type == "cpu"
    return Pointer(value.dtype, not has_data or value.data_ptr() % 16 == 0)


@dataclass(slots=True)
class Compiler:
    """Compiles every kernel that this process launches, for the chip ``arch``, and runs none.

    Create it before vLLM is imported.
    """

    arch: int = 0
    compiled: list[Compiled] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Kernels, and functions that they call, which were compiled."""

    def __post_init__(self) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler.code_generator import CodeGenerator
        from triton.runtime.jit import JITFunction

        driver = SimpleNamespace(
            is_active=lambda: True,
            get_current_device=lambda: self.arch,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", self.arch, 32),
        )
        # vLLM's CPU build takes Triton for usable if it has a backend "cpu".
        no_target = SimpleNamespace(supports_target=lambda target: False)
        triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=no_target)
        triton.runtime.driver.set_active(driver)
        launch, call = JITFunction.run, CodeGenerator.call_JitFunction

        def compile_only(kernel: JITFunction, *arguments: object, **named: object) -> None:
            name = name_of(kernel)
            self.used.add(name)
            described = {name: _describe(value) for name, value in named.items()}
            try:
                found = launch(
                    kernel, *map(_describe, arguments), **described | {"grid": None, "warmup": True}
                )
                assert found.asm["cubin"].startswith(b"\x7fELF")
                one = Compiled(kernel=name, arch=self.arch, shared_bytes=found.metadata.shared)
            except Exception as error:
                one = Compiled(kernel=name, arch=self.arch, error=f"{error}\n{error.__cause__ or ''}")
            self.compiled.append(one)

        def note_called(
            generator: CodeGenerator, function: JITFunction, *rest: object, **named: object
        ) -> object:
            self.used.add(name_of(function))
            return call(generator, function, *rest, **named)

        JITFunction.run, CodeGenerator.call_JitFunction = compile_only, note_called


def name_of(kernel: object) -> str:
    return f"{kernel.__module__}.{kernel.fn.__qualname__}"


def known_kernels() -> set[str]:
    """Return names of all functions with ``@triton.jit`` in the modules that this process has imported."""
    from triton.runtime.jit import _triton_jit_function_registry

    return {name_of(kernel) for kernel in _triton_jit_function_registry.values()}
