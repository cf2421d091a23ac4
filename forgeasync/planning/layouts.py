"""Compares the memory plan of each role with a GPU's memory.

For a trainer that does not fit, a layout that fits is proposed. For a generator, the report shows which
``weights.shadow`` fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from forgeasync.config import (
    ROW_ALIGNMENT,
    ActivationCheckpointing,
    ModelFacts,
    RunConfig,
    ShadowMemory,
    resolve,
    shares_gpus,
)
from forgeasync.models import check_config
from forgeasync.planning.memory import generator_memory, gib, planned_machine
from forgeasync.planning.parameters import Machine, ParameterCounts, count_parameters, total_bytes
from forgeasync.planning.trainer_memory import trainer_memory

GPU_GIB = 79.0
"""Assumed GPU memory in GiB on a machine without GPUs: the memory that an 80 GB H100 reports."""

USABLE_SHARE = 0.9
"""Share of a GPU's memory that a plan may use. The rest is for fragmentation of the allocator, buffers of
NCCL, the CUDA context and experts with uneven loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Trainer settings that a proposal may change without changing the number of GPUs."""

    context: int
    checkpointing: ActivationCheckpointing
    tokens_per_row: int

    def of(self, config: RunConfig) -> RunConfig:
        """Return the config with this layout."""
        parallel = config.trainer.parallel.model_copy(update={"context": self.context})
        changes = {
            "parallel": parallel,
            "activation_checkpointing": self.checkpointing,
            "tokens_per_row": self.tokens_per_row,
        }
        return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})

    def overrides(self, config: RunConfig) -> tuple[str, ...]:
        """Return the command-line overrides that give ``config`` this layout."""
        before = layout_of(config)
        pairs = (
            ("trainer.parallel.context", before.context, self.context),
            (
                "trainer.activation_checkpointing",
                before.checkpointing.value,
                self.checkpointing.value,
            ),
            ("trainer.tokens_per_row", before.tokens_per_row, self.tokens_per_row),
        )
        return tuple(f"{field}={new}" for field, old, new in pairs if old != new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Comparison of a trainer rank's memory with a GPU's, in bytes."""

    planned: int
    usable: int
    proposal: Layout | None
    """Layout that fits; None if the config's own layout fits or no layout does."""
    smallest: int
    """Bytes of a rank with ``proposal`` or, without one, with the smallest layout tried."""

    @property
    def fits(self) -> bool:
        return self.planned <= self.usable


def layout_of(config: RunConfig) -> Layout:
    """Return the layout of a config."""
    trainer = config.trainer
    return Layout(
        context=trainer.parallel.context,
        checkpointing=trainer.activation_checkpointing,
        tokens_per_row=trainer.tokens_per_row,
    )


def fit_trainer(config: RunConfig, facts: ModelFacts, *, gpu_bytes: int) -> Fit:
    """Compare a trainer rank of a checked config with a GPU; if it does not fit, look for a layout that does.

    The candidates are all legal layouts with more activation checkpointing, rows as short as
    ``model.max_context_length`` allows, and a higher context-parallel degree. They are tried in order of
    cost: lower context degrees first (context-parallel ranks share a row unevenly and gather keys and
    values), then less recomputation, then longer rows.
    """
    counts = count_parameters(facts)
    usable = int(gpu_bytes * USABLE_SHARE)
    planned = smallest = _rank_bytes(config, facts, counts)
    if planned <= usable:
        return Fit(planned=planned, usable=usable, proposal=None, smallest=planned)
    for layout in _layouts(config):
        changed = layout.of(config)
        if check_config(changed, facts):
            continue
        needed = _rank_bytes(changed, facts, counts)
        smallest = min(smallest, needed)
        if needed <= usable:
            return Fit(planned=planned, usable=usable, proposal=layout, smallest=needed)
    return Fit(planned=planned, usable=usable, proposal=None, smallest=smallest)


def _layouts(config: RunConfig) -> Iterator[Layout]:
    """Yield layouts that may need less memory, in order of cost; some may be illegal."""
    own, choices = layout_of(config), list(ActivationCheckpointing)
    shortest = -(-config.model.max_context_length // ROW_ALIGNMENT) * ROW_ALIGNMENT
    contexts = []
    degree = own.context
    while degree <= config.trainer.parallel.num_procs:
        contexts.append(degree)
        degree *= 2
    rows = dict.fromkeys((own.tokens_per_row, min(own.tokens_per_row, shortest)))
    for context, choice, tokens in product(contexts, choices[choices.index(own.checkpointing) :], rows):
        yield Layout(context=context, checkpointing=choice, tokens_per_row=tokens)


def _rank_bytes(config: RunConfig, facts: ModelFacts, counts: ParameterCounts) -> int:
    return trainer_memory(resolve(config, facts), facts, counts, Machine.GPU).total_bytes


def fit_rows(config: RunConfig, facts: ModelFacts, *, gpu_bytes: int) -> list[tuple[str, str, str]]:
    """Return the rows of the dry run's table about GPU memory; empty for a config that trains on CPUs."""
    if planned_machine(config) is Machine.CPU:
        return []
    fit = fit_trainer(config, facts, gpu_bytes=gpu_bytes)
    limit = f"{gib(fit.usable)}, {USABLE_SHARE:.0%} of a GPU with {gpu_bytes / 2**30:g} GiB"
    rows = [_fit_row("trainer rank: fits", fit.planned, fit.usable, limit)]
    if not fit.fits and fit.proposal is None:
        found = f"none with {config.trainer.parallel.num_procs} procs; the smallest takes {gib(fit.smallest)}"
        rows.append(("trainer layout that fits", "none", found))
    elif fit.proposal is not None:
        words = " ".join(fit.proposal.overrides(config))
        rows.append(("trainer layout that fits", gib(fit.smallest), words))
    if shares_gpus(config):
        both = fit.planned + _generator_bytes(config, facts, config.weights.shadow)
        return [*rows, _fit_row("both roles on one GPU: fit", both, fit.usable, limit)]
    # Adapters have no shadow weights.
    shadows = list(ShadowMemory) if config.lora is None else [config.weights.shadow]
    for shadow in shadows:
        name = f"generator rank: fits, shadow: {shadow}" if len(shadows) > 1 else "generator rank: fits"
        rows.append(_fit_row(name, _generator_bytes(config, facts, shadow), fit.usable, limit))
    return rows


def generator_fits(config: RunConfig, facts: ModelFacts, *, gpu_bytes: int) -> bool:
    """Return whether a rank of a generator fits on a GPU, with the config's ``weights.shadow``."""
    return _generator_bytes(config, facts, config.weights.shadow) <= int(gpu_bytes * USABLE_SHARE)


def _fit_row(name: str, planned: int, usable: int, limit: str) -> tuple[str, str, str]:
    if planned <= usable:
        return name, "yes", f"{gib(planned)} are at most {limit}"
    return name, "no", f"{gib(planned)} are more than {limit}"


def _generator_bytes(config: RunConfig, facts: ModelFacts, shadow: ShadowMemory) -> int:
    weights = config.weights.model_copy(update={"shadow": shadow})
    changed = config.model_copy(update={"weights": weights})
    return total_bytes(generator_memory(changed, facts, count_parameters(facts), Machine.GPU))
