"""Compares what a launcher section asks a scheduler for with what the plan says that a host needs."""

import re
from collections.abc import Iterator

from forgeasync.config import KubernetesLauncher, ModelFacts, RunConfig, SlurmLauncher
from forgeasync.planning.host_requests import HostNeeds, host_needs

_DECIMAL = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGTPE", start=1)}


def request_warnings(config: RunConfig, facts: ModelFacts) -> tuple[str, ...]:
    """Words about every request of the launcher that is below the plan, or cannot be compared with it.

    The run goes on with such a request: the plan has allowances that a user may know better.
    """
    launcher = config.launcher
    if isinstance(launcher, SlurmLauncher):
        return tuple(_slurm(launcher, host_needs(config, facts)))
    if isinstance(launcher, KubernetesLauncher):
        return tuple(_kubernetes(launcher, host_needs(config, facts)))
    return ()


def _slurm(launcher: SlurmLauncher, needs: HostNeeds) -> Iterator[str]:
    if launcher.cpus_per_task is not None and launcher.cpus_per_task < needs.num_cpus:
        yield _below("launcher.cpus_per_task", launcher.cpus_per_task, str(needs.num_cpus))
    if launcher.mem is None:
        return
    asked = slurm_bytes(launcher.mem)
    if asked is None:
        yield _not_understood("launcher.mem", launcher.mem, "512G")
    # 0 asks for all memory of a node.
    elif 0 < asked < needs.memory_bytes:
        yield _below("launcher.mem", launcher.mem, _gib(needs.memory_bytes))


def _kubernetes(launcher: KubernetesLauncher, needs: HostNeeds) -> Iterator[str]:
    requests = (
        ("launcher.resources.cpu", launcher.resources.get("cpu"), needs.num_cpus, str(needs.num_cpus)),
        (
            "launcher.resources.memory",
            launcher.resources.get("memory"),
            needs.memory_bytes,
            _gib(needs.memory_bytes),
        ),
        (
            "launcher.shared_memory_size",
            launcher.shared_memory_size,
            needs.shared_bytes,
            _gib(needs.shared_bytes),
        ),
    )
    for field, value, needed, shown in requests:
        if value is None:
            continue
        asked = kubernetes_quantity(value)
        if asked is None:
            yield _not_understood(field, value, "64" if field.endswith("cpu") else "512Gi")
        elif asked < needed:
            yield _below(field, value, shown)


def slurm_bytes(text: str) -> float | None:
    """Bytes of sbatch's ``--mem``, in MiB without a unit; None if it is no such size."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    return int(match[1]) * 2.0 ** (10 * "KMGT".index(match[2].upper() or "M") + 10)


def kubernetes_quantity(value: int | str) -> float | None:
    """A number in Kubernetes' notation, such as 1500m or 64Gi; None if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)([A-Za-z]*)", str(value).strip())
    factor = None if match is None else (_DECIMAL | _BINARY).get(match[2])
    return None if match is None or factor is None else float(match[1]) * factor


def _below(field: str, value: object, needed: str) -> str:
    return f"{field} = {value}: a host needs {needed} by the plan; left out, that is asked for"


def _not_understood(field: str, value: object, form: str) -> str:
    return f"{field} = {value}: cannot be compared with the plan; must be written like {form}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
