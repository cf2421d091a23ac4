"""The tables of ``weight_sync.py``: a row per transport and size."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

GOALS = (
    "goals: publish <= 1.50 x copy; fetch >= 0.60 x memcpy by shared memory; gap - median gap <= memcpy of "
    "what the engine takes; nothing grows"
)

Results = Mapping[str, Mapping[str, Any]]
"""Results that ``weight_fleet.py`` wrote, by size."""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _title(name: str, size: Mapping[str, Any]) -> str:
    return f"{name} {size['dtype']}, {size['num_bytes'] / 1e6:.0f} MB"


def _table(title: str, *columns: str, caption: str = "") -> Table:
    table = Table(title=title, caption=caption or None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number > 1 else "left")
    return table


def updates_table(results: Results) -> Table:
    """Medians over rounds; ratios are medians of the rounds' ratios."""
    columns = ("publish ms", "x cast", "x same", "call", "fetch ms", "GB/s", "x memcpy", "moved", "pause ms")
    last = ("gap ms", "longest", "median", "memcpy", "update")
    table = _table("one version, ms", "size", "transport", *columns, *last, caption=GOALS)
    for name, size in results.items():
        for transport, rounds in size["rounds"].items():
            table.add_row(_title(name, size), transport, *_update_cells(rounds, size["median_gap_s"]))
        table.add_section()
    return table


def _update_cells(rounds: list[dict[str, Any]], median_gap_s: float) -> list[str]:
    def middle(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(value(one) for one in rounds)

    def update(value: Callable[[dict[str, Any]], float]) -> float:
        return middle(lambda one: value(one["update"]))

    return [
        _ms(middle(lambda one: one["staging_s"])),
        f"{middle(lambda one: one['staging_s'] / one['cast_s']):.2f}",
        f"{middle(lambda one: one['staging_s'] / one['same_s']):.2f}",
        _ms(middle(lambda one: one["call_s"])),
        _ms(update(lambda one: one["fetch"]["fetch_s"])),
        f"{update(lambda one: one['fetch']['num_bytes_moved'] / one['fetch']['fetch_s']) / 1e9:.2f}",
        f"{update(lambda one: one['memcpy_s'] / one['fetch']['fetch_s']):.2f}",
        f"x{update(lambda one: one['fetch']['num_bytes_moved'] / one['fetch']['num_bytes_needed']):.2f}",
        f"{update(lambda one: one['swap']['pause_s']) * 1e3:.2f}",
        _ms(update(lambda one: one["swap_gap_s"])),
        _ms(update(lambda one: one["longest_gap_s"])),
        _ms(median_gap_s),
        _ms(update(lambda one: one["engine_memcpy_s"])),
        _ms(update(lambda one: one["total_s"])),
    ]


def growth_table(results: Results) -> Table:
    """Memory and time of many updates."""
    columns = ("updates", "MiB after 5", "after all", "growth", "first 10 ms", "last 10 ms", "ratio")
    table = _table("the same update again and again", "size", "transport", *columns)
    for name, size in results.items():
        for transport, one in size["growth"].items():
            first_mib, last_mib = one["after_5_mib"], one["after_all_mib"]
            table.add_row(
                _title(name, size),
                transport,
                str(one["num_updates"]),
                f"{first_mib:.0f}",
                f"{last_mib:.0f}",
                f"{last_mib - first_mib:+.0f}",
                _ms(one["first_10_s"]),
                _ms(one["last_10_s"]),
                f"x{one['last_10_s'] / one['first_10_s']:.2f}",
            )
    return table


def delta_table(results: Results) -> Table:
    """Bytes moved by a generator that holds the version before."""
    table = _table("delta: share of the bytes moved, by what has changed", "size", "transport")
    changes = list(dict.fromkeys(c for size in results.values() for d in size["delta"].values() for c in d))
    for change in changes:
        table.add_column(change, justify="right")
        table.add_column("fetch ms", justify="right")
    for name, size in results.items():
        for transport, found in size["delta"].items():
            cells = []
            for change in changes:
                one = found[change]
                cells += [f"{one['num_bytes_moved'] / one['num_bytes_needed']:.4f}", _ms(one["fetch_s"])]
            table.add_row(_title(name, size), transport, *cells)
    return table


def busy_table(results: Results) -> Table:
    """Fetches over RDMA that the owner's event loop has no part in."""
    columns = ("idle ms", "in a step ms", "step ms", "over before the step")
    table = _table("fetch over RDMA while the owners compute", "size", "transport", *columns)
    for name, size in results.items():
        one = size["while_owner_computes"]
        if one is not None:
            is_over = "yes" if one["was_over_before_the_step"] else "no"
            times = [_ms(one[key]) for key in ("fetch_idle_s", "fetch_busy_s", "step_s")]
            table.add_row(_title(name, size), "rdma", *times, is_over)
    return table


def modes_table(results: Results) -> Table:
    """Tokens that are not generated during an update."""
    columns = ("update ms", "tokens", "as in flight", "lost", "lost of them")
    table = _table("an update under every mode, by shared memory", "size", "mode", *columns)
    for name, size in results.items():
        rate = statistics.median(one["tokens_per_s"] for one in size["modes"]["in_flight"])
        for mode, runs in size["modes"].items():
            update_s = statistics.median(one["update_s"] for one in runs)
            tokens = statistics.median(one["num_tokens"] for one in runs)
            lost = statistics.median(rate * one["update_s"] - one["num_tokens"] for one in runs)
            share = statistics.median(1 - one["num_tokens"] / (rate * one["update_s"]) for one in runs)
            cells = (_ms(update_s), f"{tokens:.0f}", f"{rate * update_s:.0f}", f"{lost:.0f}", f"{share:.0%}")
            table.add_row(_title(name, size), mode, *cells)
    return table
