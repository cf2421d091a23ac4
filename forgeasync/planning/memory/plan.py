"""The memory plan of a run, as sections and as rows of a table: what ``--dry-run`` prints too."""

from collections.abc import Sequence
from dataclasses import dataclass

from forgeasync.config import Dtype, ModelFacts, RunConfig
from forgeasync.planning.memory.generator import generator_memory
from forgeasync.planning.memory.host import host_memory
from forgeasync.planning.memory.items import Machine, MemoryItem, total_bytes
from forgeasync.planning.memory.parameters import count_parameters
from forgeasync.planning.memory.teachers import teacher_memory
from forgeasync.planning.memory.trainer import trainer_memory

NOTE = (
    "Memory is within 10 % as measured on CPUs, in float32. Not so exact: rows with fewer than "
    "tokens_per_row tokens, experts with uneven loads, compiled layers and adapters take less or more; the "
    "engine's forward pass is a bound, the payload store is at its fullest. The allocator's fragmentation, "
    "buffers of NCCL, CUDA graphs and the libraries of each process come on top."
)

Row = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySection:
    """The memory of one rank of a role, or of the hosts."""

    owner: str
    items: Sequence[MemoryItem]
    total: MemoryItem | None
    """None where the items lie in many places."""


def planned_machine(config: RunConfig) -> Machine:
    """Return the machine that a config is planned for: CPUs train in float32, GPUs in bfloat16."""
    return Machine.CPU if config.trainer.dtype is Dtype.FLOAT32 else Machine.GPU


def memory_plan(config: RunConfig, facts: ModelFacts) -> tuple[MemorySection, ...]:
    """Sections of the plan; ``config`` was checked with these facts.

    Raises:
        ConfigError: a teacher's folder has no config.json that can be read.
    """
    machine = planned_machine(config)
    counts = count_parameters(facts)
    trainer = trainer_memory(config, facts, counts, machine)
    generator = generator_memory(config, facts, counts, machine)
    fullest = MemoryItem(
        name="total",
        num_bytes=trainer.total_bytes,
        how=f"of a {machine.value}, in the {trainer.fullest.name}: not all of the above is there at once",
    )
    return (
        MemorySection(owner="trainer rank", items=(*trainer.always, *trainer.come_and_go), total=fullest),
        MemorySection(owner="generator rank", items=generator, total=_whole(generator, machine)),
        *(
            MemorySection(owner=f"rank of teacher {name}", items=items, total=_whole(items, machine))
            for name, items in teacher_memory(config, machine)
        ),
        MemorySection(owner="host", items=host_memory(config, facts, machine), total=None),
    )


def _whole(items: Sequence[MemoryItem], machine: Machine) -> MemoryItem:
    return MemoryItem(name="total", num_bytes=total_bytes(items), how=f"of a {machine.value}")


def memory_rows(section: MemorySection) -> list[Row]:
    """Name, size and how it comes about; then the total."""
    items = [*section.items, *([] if section.total is None else [section.total])]
    return [(f"{section.owner}: {item.name}", gib(item.num_bytes), item.how) for item in items]


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
