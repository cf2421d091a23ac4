"""What engines on GPUs rely on in vLLM's sources, which the CPU build ships too: read, not run."""

import ast
import importlib
import inspect
import textwrap

from tests.support import gpu_runner


def resolve(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def attributes_of(cls: type) -> set[str]:
    """Names of class attributes, and of those that methods set on ``self``; of base classes too."""
    names: set[str] = set()
    for one in cls.__mro__[:-1]:
        names |= {name for name in vars(one) if not name.startswith("__")}
        names |= {
            node.attr
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one))))
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    return names


def test_our_extension_hides_nothing_of_the_gpu_worker() -> None:
    """vLLM compares class attributes alone: what either sets on itself would be overwritten in silence."""
    from vllm.v1.worker.gpu_worker import Worker

    from forgeasync.generator import GPU_WORKER_EXTENSION

    extension, worker = attributes_of(resolve(GPU_WORKER_EXTENSION)), attributes_of(Worker)
    assert "model_runner" in worker and "swap_weights" in extension, "the search finds something"
    assert not extension & worker


def test_the_runner_of_these_tests_is_the_gpus() -> None:
    """The CPU build's subclass has a method for warming up and nothing else of its own."""
    path = resolve("vllm.v1.worker.cpu.model_runner.CPUModelRunner").__module__
    tree = ast.parse(inspect.getsource(importlib.import_module(path)))
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert [base.id for base in cls.bases] == ["GPUModelRunner"]
    assert [node.name for node in cls.body if isinstance(node, ast.FunctionDef)] == ["warming_up_model"]


def test_operators_of_these_tests_have_the_parameters_of_vllms() -> None:
    import vllm._custom_ops as ops

    stand_ins = (
        gpu_runner.topk_softmax,
        gpu_runner.moe_align_block_size,
        gpu_runner.moe_lora_align_block_size,
        gpu_runner.moe_sum,
    )
    for function in stand_ins:
        theirs = inspect.signature(getattr(ops, function.__name__)).parameters.values()
        ours = inspect.signature(function).parameters.values()
        assert [(one.name, one.default) for one in ours] == [(one.name, one.default) for one in theirs]
