"""The trainer's own model at real sizes, forward and backward on rank 0 of real layouts, without data.

Seen are shapes, dtypes and alignment (torch's meta kernels refuse what the real ones would), sharding, memory
against the plan, and the order of collectives on several ranks. Values are not. Two layers stand for all:
layers are alike.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from forgeasync.config import ModelFacts, RunConfig, load_config
from forgeasync.models import LOGITS_CHUNK_TOKENS, SHIPPED_MODELS, read_model_facts
from forgeasync.planning import (
    FLOAT32_BYTES,
    Machine,
    Moment,
    count_parameters,
    step_moments,
    trainer_parameters_per_rank,
)
from tests.support.config_samples import CONFIGS
from tests.support.without_data import EAGER, Case, Seen, look_at, with_layers

pytestmark = pytest.mark.timeout(900)

QWEN3_32B = read_model_facts(str(SHIPPED_MODELS / "Qwen--Qwen3-32B"))


def _long(length: int, context: int) -> tuple[str, ...]:
    return (
        "model.path=Qwen/Qwen3-30B-A3B-Instruct-2507",
        f"model.max_context_length={length}",
        f"trainer.tokens_per_row={length}",
        f"sampling.max_response_tokens={length - 2048}",
        f"trainer.parallel.context={context}",
    )


def _dense(parallel: str) -> Case:
    shares = f"trainer.share_prefixes={'context' not in parallel}"
    changes = ("trainer.routing_replay=off", f"trainer.parallel={{{parallel}}}", shares)
    return Case(config="qwen3_30b_a3b", overrides=changes, facts=asdict(QWEN3_32B))


CASES = {
    "30b": Case(config="qwen3_30b_a3b"),
    "30b-131072-cp2": Case(config="qwen3_30b_a3b", overrides=_long(131072, 2)),
    "30b-32768-tp2-cp2": Case(
        config="qwen3_30b_a3b", overrides=(*_long(32768, 2), "trainer.parallel.tensor=2")
    ),
    "30b-selective-ac": Case(
        config="qwen3_30b_a3b",
        overrides=("trainer.activation_checkpointing=selective", "trainer.share_prefixes=false"),
    ),
    "235b": Case(config="qwen3_235b_a22b"),
    "8b": Case(config="qwen3_8b"),
    # Three layers of linear attention, and one of full attention.
    "qwen3_5": Case(config="qwen3_5_35b_a3b", num_layers=4),
    # One layer with a window, and one without.
    "gpt_oss": Case(config="gpt_oss_120b"),
    "32b": Case(config="qwen3_32b"),
    "32b-fsdp": _dense("num_procs: 16"),
    "32b-tp8": _dense("num_procs: 16, tensor: 8"),
    "32b-cp4": _dense("num_procs: 16, context: 4"),
}

REPRESENTATIVE = "30b"

TENSOR_PARALLEL = {"30b-32768-tp2-cp2", "235b", "gpt_oss", "32b", "32b-tp8"}
"""Tensors inside of DTensors are not seen by what counts memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    config: RunConfig
    facts: ModelFacts
    seen: Seen


_seen: dict[str, Seen] = {}


def _look(name: str, library: Path) -> Outcome:
    if name not in _seen:
        others = {other: case for other, case in CASES.items() if other != REPRESENTATIVE}
        _seen.update(look_at({name: CASES[name]} if name == REPRESENTATIVE else others, library))
    case = CASES[name]
    config = load_config(CONFIGS / f"{case.config}.yaml", [*case.overrides, EAGER])
    facts = read_model_facts(config.model.path) if case.facts is None else QWEN3_32B
    facts = with_layers(facts, case.num_layers)
    return Outcome(config=config, facts=facts, seen=_seen[name])


def _marked(names: Iterable[str]) -> list[object]:
    return [
        pytest.param(name, marks=[] if name == REPRESENTATIVE else pytest.mark.exhaustive)
        for name in sorted(names)
    ]


@pytest.mark.processes
@pytest.mark.parametrize("name", _marked(CASES))
def test_a_row_at_real_sizes(name: str, library: Path) -> None:
    outcome = _look(name, library)
    config, facts, seen = outcome.config, outcome.facts, outcome.seen
    parallel, length = config.trainer.parallel, config.trainer.tokens_per_row
    part = length // parallel.context
    assert seen.devices == ["cuda:0"]
    assert seen.logprobs == ["torch.float32", [config.sampling.max_response_tokens]]
    assert set(map(str, seen.gradients)) == {"['torch.float32', True]"}

    # Rank 0 has the first part of the row, which is one sequence: its queries see no key behind the part.
    heads, kv_heads = facts.num_heads // parallel.tensor, facts.num_kv_heads // parallel.tensor
    expected = [
        "torch.bfloat16",
        [part, heads, facts.head_dim],
        [part, kv_heads, facts.head_dim],
        [2, 2, "torch.int32"],
        [part, part],
    ]
    # With full checkpointing every layer computes it twice.
    times = 2 if config.trainer.activation_checkpointing.value == "full" else 1
    num_attention_layers = facts.num_layers if facts.linear is None else facts.num_full_layers
    assert seen.attention == [expected] * (times * num_attention_layers)
    if facts.linear is not None:
        keys, values = (
            ["torch.bfloat16", [1, part, facts.linear.num_value_heads, size]]
            for size in (facts.linear.key_head_dim, facts.linear.value_head_dim)
        )
        decays = ["torch.float32", [1, part, facts.linear.num_value_heads]]
        calls = [keys, keys, values, decays, ["torch.int32", [2]]]
        assert seen.states == [calls] * (times * (facts.num_layers - facts.num_full_layers))

    num_targets = part - (length - config.sampling.max_response_tokens) + 1
    assert max(rows for rows, _ in seen.logits) == min(LOGITS_CHUNK_TOKENS, num_targets)
    assert {columns for _, columns in seen.logits} == {facts.vocab_size // parallel.tensor}

    assert {dtype for product in seen.products for dtype, _ in product} <= {"torch.bfloat16"}
    if not facts.num_experts:
        assert seen.products == []
        return
    tokens = part // (parallel.tensor if parallel.sequence else 1) * facts.top_k
    experts, inner = facts.num_experts // parallel.expert, facts.expert_hidden_size
    # gpt-oss has gate and up in one product.
    widths = [2 * inner] if facts.model_type == "gpt_oss" else [inner, inner]
    *up, down = seen.products[: len(widths) + 1]
    for (rows, weights), width in zip(up, widths, strict=True):
        assert rows == ["torch.bfloat16", [tokens, facts.hidden_size]]
        assert weights == ["torch.bfloat16", [experts, facts.hidden_size, width]]
    assert down == [
        ["torch.bfloat16", [tokens, inner]],
        ["torch.bfloat16", [experts, inner, facts.hidden_size]],
    ]


@pytest.mark.processes
@pytest.mark.parametrize("name", _marked(CASES.keys() - TENSOR_PARALLEL))
def test_memory_is_what_is_planned(name: str, library: Path) -> None:
    """Between 25 % below the plan and 10 % above: rank 0 has the part of a row that begins with a prompt.

    Its shards of gradients may be there at the fullest moment already. A torch built without CUDA
    composes norms of float32 tensors and keeps two: these come on top here.
    """
    outcome = _look(name, library)
    config, facts = outcome.config, outcome.facts
    moments = step_moments(config, facts, count_parameters(facts), Machine.GPU)
    parallel = config.trainer.parallel
    tokens = config.trainer.tokens_per_row // parallel.context
    heads = facts.num_heads + facts.num_kv_heads
    last_norm = 2 * FLOAT32_BYTES * tokens * facts.hidden_size
    of_layer = 2 * FLOAT32_BYTES * tokens * (2 * facts.hidden_size + heads * facts.head_dim)

    def total(moment: Moment) -> float:
        in_layer = "backward pass of" in moment.name and " layer" in moment.name.replace("output layer", "")
        return moment.total + (of_layer if in_layer else last_norm)

    kept = moments[0].activations + moments[0].gathered_weights + last_norm
    peak = max(total(moment) for moment in moments if moment.name != "optimizer step")
    gradients = trainer_parameters_per_rank(config, count_parameters(facts)) * FLOAT32_BYTES
    assert 0.75 * kept < outcome.seen.kept_bytes < 1.1 * kept
    assert 0.75 * peak < outcome.seen.peak_bytes < 1.1 * (peak + gradients)


RANKS = {
    "30b": range(16),
    "235b": (0, 1, 2, 3, 4, 5, 8, 12, 28, 32, 63),
    "30b-32768-tp2-cp2": (0, 1, 2, 3, 4, 7, 15),
}
"""Ranks of which the collectives are compared, where their process groups meet."""

NUM_TOKENS = (None, 1024, 0)
"""Rows of the data ranks, in turn: a full one, one of a short sequence, one of padding."""


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("name", RANKS)
def test_ranks_of_a_group_make_the_same_collectives(name: str, library: Path) -> None:
    """Another operator, size or order on one rank of a group would let NCCL wait for ever."""
    case = CASES[name]
    parallel = load_config(CONFIGS / f"{case.config}.yaml", list(case.overrides)).trainer.parallel
    ranks_per_row = parallel.tensor * parallel.context
    cases = {
        str(rank): replace(case, rank=rank, num_tokens=NUM_TOKENS[rank // ranks_per_row % len(NUM_TOKENS)])
        for rank in RANKS[name]
    }
    by_group: dict[tuple[int, ...], dict[int, list[object]]] = {}
    for rank, seen in look_at(cases, library).items():
        for operator, group, sizes in seen.collectives:
            by_group.setdefault(tuple(group), {}).setdefault(int(rank), []).append([operator, sizes])
    num_compared = 0
    for group, by_rank in by_group.items():
        present = [rank for rank in RANKS[name] if rank in group]
        assert by_rank.keys() == set(present), f"group {group}: only some ranks take part"
        first, *others = by_rank.values()
        for other in others:
            assert other == first, f"group {group}"
        num_compared += len(others) * len(first)
    assert num_compared > 100


BITWISE = tuple(
    Case(config="qwen3_30b_a3b", overrides=("trainer.parallel.expert=1", *changes), is_bitwise=True, **kinds)
    for changes, kinds in (
        ((), {}),
        (("trainer.routing_replay=off",), {"facts": asdict(QWEN3_32B)}),
    )
)


@pytest.mark.processes
def test_operators_of_an_engine_get_tensors_on_the_gpu(library: Path) -> None:
    """``fidelity: bitwise``. A value that the host would wait for raises."""
    of_moe, of_dense = look_at({"moe": BITWISE[0], "dense": BITWISE[1]}, library).values()
    of_both = {
        "linear_batch_invariant",
        "rms_norm_batch_invariant",
        "fused_add_rms_norm",
        "rotary_embedding",
        "triton_reshape_and_cache_flash",
        "unified_attention",
        "apply_temperature",
        "compute_token_logprobs",
    }
    assert set(of_moe.engine_operators) == of_both | {"fused_topk", "fused_experts"}
    assert set(of_dense.engine_operators) == of_both | {"silu_and_mul"}
    for seen in (of_moe, of_dense):
        assert {dtype for dtype, _ in seen.gradients} == {"torch.float32"}
        assert seen.logprobs[0] == "torch.float32"
