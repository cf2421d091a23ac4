"""What a row and an optimizer step of the trainer may ask of host and GPU: waits, operators, collectives.

Counted on rank 0 of real layouts, at real sizes with two layers, without data and not compiled. Nothing here
is a time. But a host needs time for each operator, and after a wait between rows the GPU has nothing to do.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from forgeasync.config import load_config
from forgeasync.models import LOGITS_CHUNK_TOKENS
from tests.support.config_samples import CONFIGS
from tests.support.step_counts import Steps, count_steps
from tests.support.without_data import Case

NUM_LAYERS = 2

CHUNK_OPERATORS = 63
"""Of a chunk's log-probabilities and entropies: forward, once more for the backward pass, and that pass."""

Waits = dict[tuple[str, str], int]
"""Number of waits by kind and function."""

REPORT = {("download", "_of_row"): 1}
"""The values of a row's tokens are read after the optimizer step, in runs that report single tokens."""

STEP_WAITS: Waits = {
    # The denominators of the loss, before the first row.
    ("read", "count_targets"): 1,
    # After the last row: the norm of the gradients, sums and maxima of metrics, and whether they are finite.
    ("read", "_step"): 1,
    ("read", "_reduced"): 2,
    ("read", "describe_rows"): 1,
    # Whether any rank has a problem with its rows, and then with its weights; whether this rank's are finite.
    ("read", "agree_on_problem"): 2,
    ("read", "describe_non_finite"): 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """``layer`` and ``rest`` are operators of a row besides chunks; ``step`` those of a step besides rows."""

    layer: int
    rest: int
    step: int
    row_waits: Waits
    step_waits: Waits
    row_collectives: dict[str, int]
    step_collectives: dict[str, int]


BUDGETS = {
    "qwen3_8b": Budget(
        # A layer runs forward twice (full activation checkpointing) and backward once. It gathers the keys of
        # shared prefixes.
        layer=567,
        # Embedding, loss, metrics, and 14 copies to the device.
        rest=320,
        # For each parameter, the extreme values of gradient and weight; norm, clipping and AdamW are fused.
        step=150,
        row_waits=REPORT,
        step_waits=STEP_WAITS,
        # FSDP2 gathers a layer's weights twice and scatters its gradients once. Besides layers there are the
        # embedding, the head and the root.
        row_collectives={
            "_allgather_base": 2 * NUM_LAYERS + 4,
            "_reduce_scatter_base": NUM_LAYERS + 3,
        },
        # Counts of targets, norm of gradients; sums and maxima of metrics, whether rows and weights have a
        # problem; names of metrics.
        step_collectives={"all_reduce": 2, "allreduce": 4, "all_gather_object": 1},
    ),
    "qwen3_30b_a3b": Budget(
        # Also routing, its replay, and the exchange of tokens between expert-parallel ranks.
        layer=900,
        # Also 1 copy to the device: the recorded experts.
        rest=330,
        step=180,
        # TorchTitan reads how many tokens go to each rank, in both forward passes of a layer; the report also
        # has the decisions of routers.
        row_waits={("splits", "dispatch"): 2 * NUM_LAYERS, ("download", "_of_row"): 2},
        # Also the routers' counts.
        step_waits=STEP_WAITS | {("read", "metrics"): 1},
        # Of a layer: counts, inputs and outputs of experts in 2 forward passes, and gradients of inputs and
        # outputs. FSDP2 gathers and scatters experts apart from the rest.
        row_collectives={
            "all_to_all_single": (2 * 3 + 2) * NUM_LAYERS,
            "_allgather_base": 4 * NUM_LAYERS + 4,
            "_reduce_scatter_base": 2 * NUM_LAYERS + 3,
        },
        # Norms of experts' and other gradients apart; also the routers' counts.
        step_collectives={"all_reduce": 3, "allreduce": 5, "all_gather_object": 1},
    ),
}


@pytest.fixture(scope="module")
def found(library: Path) -> dict[str, Steps]:
    return count_steps({name: Case(config=name, num_layers=NUM_LAYERS) for name in BUDGETS}, library)


def _waits(steps: Steps) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Waits of a row and of a step besides its rows."""
    one, two = (
        Counter((kind, function) for kind, function, _ in counts.waits)
        for counts in (steps.one_row, steps.two_rows)
    )
    row = two - one
    return row, one - row


@pytest.mark.processes
@pytest.mark.parametrize("name", BUDGETS)
def test_the_host_waits_for_the_device_where_it_has_to(name: str, found: dict[str, Steps]) -> None:
    """The message has the lines that wait: reads (``.item()``), sizes (masks), copies of pageable memory."""
    allowed = BUDGETS[name].row_waits.keys() | BUDGETS[name].step_waits.keys()
    waits = found[name].one_row.waits
    lines = [f"{kind} in {place}" for kind, function, place in waits if (kind, function) not in allowed]
    assert not lines, "\n".join(lines)
    assert _waits(found[name]) == (BUDGETS[name].row_waits, BUDGETS[name].step_waits), waits


@pytest.mark.processes
@pytest.mark.parametrize("name", BUDGETS)
def test_a_row_and_a_step_keep_to_their_operators(name: str, found: dict[str, Steps]) -> None:
    budget, steps = BUDGETS[name], found[name]
    row = steps.two_rows.num_operators - steps.one_row.num_operators
    num_targets = load_config(CONFIGS / f"{name}.yaml").sampling.max_response_tokens
    num_chunks = -(-num_targets // LOGITS_CHUNK_TOKENS)
    most = CHUNK_OPERATORS * num_chunks + budget.layer * NUM_LAYERS + budget.rest
    step = steps.one_row.num_operators - row
    assert row <= most and step <= budget.step
    assert row > 0.95 * most and step > 0.9 * budget.step, "operators were removed: lower the budget"


@pytest.mark.processes
@pytest.mark.parametrize("name", BUDGETS)
def test_ranks_meet_as_often_as_they_have_to(name: str, found: dict[str, Steps]) -> None:
    one, two = (Counter(counts.collectives) for counts in (found[name].one_row, found[name].two_rows))
    row = two - one
    assert (row, one - row) == (BUDGETS[name].row_collectives, BUDGETS[name].step_collectives)
