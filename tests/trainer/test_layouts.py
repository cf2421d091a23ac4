"""One optimizer step under every parallel layout of up to four processes, against a single process.

Recorded experts and kept sets are replayed, rows are packed, and one data rank has a row more to train on
than the others. Gradients are compared whole, tensor by tensor (of every expert), as the optimizer sees them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from _pytest.mark.structures import ParameterSet
from safetensors.torch import load_file

from forgeasync.config import ActivationCheckpointing, Dtype, ParallelSection, RouterBias
from forgeasync.models import read_model_facts, untrained_tensors
from forgeasync.rollouts import NUM_WORST, TokenValues, merged_reports
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import TrainingSequence
from tests.support.families import write_family
from tests.support.layouts import LEARNING_RATE, Case, Inputs, Outcome, take_steps
from tests.support.lora import LORA
from tests.support.processes import ProcessFailed, run_ranks
from tests.support.trainers import TOKENS_PER_ROW, make_sequences

# The first test of a launch waits for all of its cases.
pytestmark = pytest.mark.timeout(900)

ATTENTION_LORA = LORA.model_copy(update={"targets": ("q_proj", "v_proj", "o_proj")})
FULL, SELECTIVE = ActivationCheckpointing.FULL, ActivationCheckpointing.SELECTIVE
BFLOAT16 = Dtype.BFLOAT16
TOLERANCE = 1e-4
LONG_ROW = 2048
"""Its targets are more than the output layer takes at once (LOGITS_CHUNK_TOKENS)."""

MOE, DENSE = (Case(model=name, sequences=name) for name in ("moe", "dense"))
MANY = replace(MOE, sequences="many")
ADAPTERS = replace(MOE, lora=LORA)
GPU_MOE, GPU_DENSE = (replace(case, gpu_attention=True) for case in (MOE, DENSE))


def layout(case: Case = MOE, **degrees: int | bool) -> Case:
    return replace(case, parallel=ParallelSection(**degrees))


FAMILIES = ("llama3_rope", "deepseek_v3", "deepseek_v3_one_group", "glm4_moe", "gpt_oss")
DEEPSEEK = Case(model="deepseek_v3", sequences="deepseek_v3", router_bias=RouterBias.UPDATED)
ONE_GROUP = replace(DEEPSEEK, model="deepseek_v3_one_group")
GLM = replace(DEEPSEEK, model="glm4_moe", sequences="glm4_moe")
GPT_OSS = Case(model="gpt_oss", sequences="gpt_oss")
LLAMA = Case(model="llama3_rope", sequences="llama3_rope")

ALONE = {
    "moe": MOE,
    "dense": DENSE,
    "moe, many sequences": MANY,
    "moe, own routing": replace(MOE, sequences="unrecorded"),
    "moe, bfloat16": replace(MOE, dtype=BFLOAT16, learning_rate=1e-5),
    "moe, bfloat16, varlen": replace(GPU_MOE, dtype=BFLOAT16, learning_rate=1e-5),
    "moe, small step": replace(MOE, learning_rate=1e-5),
    "adapters": ADAPTERS,
    "llama": LLAMA,
    "deepseek": DEEPSEEK,
    "deepseek, one group": ONE_GROUP,
    "glm": GLM,
    "gpt-oss": GPT_OSS,
    "gpt-oss, adapters": replace(GPT_OSS, lora=ATTENTION_LORA),
    "gpt-oss, bfloat16, varlen": replace(GPT_OSS, dtype=BFLOAT16, learning_rate=1e-5, gpu_attention=True),
    "gpt-oss, small step": replace(GPT_OSS, learning_rate=1e-5),
    "moe, compiled": replace(MOE, compile=True),
    "moe, bfloat16, full AC": replace(MOE, dtype=BFLOAT16, checkpointing=FULL),
    "moe, bfloat16, full AC, compiled": replace(MOE, dtype=BFLOAT16, checkpointing=FULL, compile=True),
    "adapters, bfloat16, full AC, compiled": replace(
        ADAPTERS, dtype=BFLOAT16, checkpointing=FULL, compile=True
    ),
}
"""Without a mesh."""

LAYOUTS = {
    "fsdp2": layout(num_procs=2),
    "fsdp2-ep2": layout(num_procs=2, expert=2),
    "fsdp2-ep2-full-ac": layout(replace(MOE, checkpointing=FULL), num_procs=2, expert=2),
    "fsdp2-ep2-offload": layout(replace(MOE, cpu_offload=True), num_procs=2, expert=2),
    "replicate2": layout(num_procs=2, data_replicate=2),
    "tp2": layout(num_procs=2, tensor=2, sequence=False),
    "tp2-sp-ep2": layout(num_procs=2, tensor=2, expert=2),
    "cp2": layout(num_procs=2, context=2),
    "cp2-varlen": layout(GPU_MOE, num_procs=2, context=2),
    "cp2-ep2-full-ac-varlen": layout(replace(GPU_MOE, checkpointing=FULL), num_procs=2, context=2, expert=2),
    "cp2-ep2-selective-ac-varlen": layout(
        replace(GPU_MOE, checkpointing=SELECTIVE), num_procs=2, context=2, expert=2
    ),
    "fsdp2-ep2-full-ac-compiled": layout(
        replace(MOE, checkpointing=FULL, compile=True), num_procs=2, expert=2
    ),
    "fsdp2-tp2-sp-ep2-full-ac-compiled": layout(
        replace(MOE, checkpointing=FULL, compile=True), num_procs=4, tensor=2, expert=2
    ),
    "cp2-compiled-varlen": layout(replace(GPU_MOE, compile=True), num_procs=2, context=2),
    "cp2-ep2-full-ac": layout(replace(MOE, checkpointing=FULL), num_procs=2, context=2, expert=2),
    "fsdp4": layout(num_procs=4),
    "fsdp4-ep4": layout(num_procs=4, expert=4),
    "fsdp4-ep2-selective-ac": layout(replace(MOE, checkpointing=SELECTIVE), num_procs=4, expert=2),
    "hsdp2x2": layout(num_procs=4, data_replicate=2),
    "hsdp2x2-ep2": layout(num_procs=4, data_replicate=2, expert=2),
    "fsdp2-tp2": layout(num_procs=4, tensor=2, sequence=False),
    "fsdp2-tp2-sp-ep2": layout(num_procs=4, tensor=2, expert=2),
    "fsdp2-tp2-sp-ep4-selective-ac": layout(
        replace(MOE, checkpointing=SELECTIVE), num_procs=4, tensor=2, expert=4
    ),
    "replicate2-tp2-sp-ep2": layout(num_procs=4, data_replicate=2, tensor=2, expert=2),
    "fsdp2-cp2-ep2": layout(num_procs=4, context=2, expert=2),
    "replicate2-cp2-ep2": layout(num_procs=4, data_replicate=2, context=2, expert=2),
    "cp2-tp2": layout(num_procs=4, context=2, tensor=2, sequence=False),
    "cp2-tp2-sp-ep2": layout(num_procs=4, context=2, tensor=2, expert=2),
    "cp2-tp2-sp-ep4": layout(num_procs=4, context=2, tensor=2, expert=4),
    "cp2-tp2-sp-ep4-varlen": layout(GPU_MOE, num_procs=4, context=2, tensor=2, expert=4),
    "cp4-ep4-varlen": layout(GPU_MOE, num_procs=4, context=4, expert=4),
    "cp4-ep4": layout(num_procs=4, context=4, expert=4),
    "dense-fsdp2": layout(DENSE, num_procs=2),
    "dense-tp2-sp": layout(DENSE, num_procs=2, tensor=2),
    "dense-fsdp2-full-ac-compiled": layout(replace(DENSE, checkpointing=FULL, compile=True), num_procs=2),
    "dense-tp2-sp-full-ac-compiled": layout(
        replace(DENSE, checkpointing=FULL, compile=True), num_procs=2, tensor=2
    ),
    "dense-tp2": layout(DENSE, num_procs=2, tensor=2, sequence=False),
    "dense-cp2": layout(DENSE, num_procs=2, context=2),
    "dense-cp2-varlen": layout(GPU_DENSE, num_procs=2, context=2),
    "dense-hsdp2x2": layout(DENSE, num_procs=4, data_replicate=2),
    "dense-fsdp2-tp2-sp": layout(DENSE, num_procs=4, tensor=2),
    "dense-fsdp2-cp2-full-ac": layout(replace(DENSE, checkpointing=FULL), num_procs=4, context=2),
    "dense-replicate2-tp2-sp": layout(DENSE, num_procs=4, data_replicate=2, tensor=2),
    "dense-cp2-tp2-sp": layout(DENSE, num_procs=4, context=2, tensor=2),
    "llama-fsdp2": layout(LLAMA, num_procs=2),
    "llama-tp2-sp": layout(LLAMA, num_procs=2, tensor=2),
    "llama-cp2": layout(LLAMA, num_procs=2, context=2),
    "deepseek-fsdp2": layout(DEEPSEEK, num_procs=2),
    "deepseek-tp2": layout(DEEPSEEK, num_procs=2, tensor=2, sequence=False),
    "deepseek-tp2-sp-ep2": layout(DEEPSEEK, num_procs=2, tensor=2, expert=2),
    "deepseek-cp2": layout(DEEPSEEK, num_procs=2, context=2),
    "deepseek-one-group-tp2-sp-ep2": layout(ONE_GROUP, num_procs=2, tensor=2, expert=2),
    "gpt-oss-fsdp2": layout(GPT_OSS, num_procs=2),
    "gpt-oss-tp2": layout(GPT_OSS, num_procs=2, tensor=2, sequence=False),
    "gpt-oss-tp2-sp-ep2": layout(GPT_OSS, num_procs=2, tensor=2, expert=2),
    "gpt-oss-fsdp2-ep2-full-ac-compiled": layout(
        replace(GPT_OSS, checkpointing=FULL, compile=True), num_procs=2, expert=2
    ),
    "gpt-oss-cp2": layout(GPT_OSS, num_procs=2, context=2),
    "gpt-oss-cp2-ep2-selective-ac-varlen": layout(
        replace(GPT_OSS, checkpointing=SELECTIVE, gpu_attention=True), num_procs=2, context=2, expert=2
    ),
    "gpt-oss-cp2-full-ac-compiled-varlen": layout(
        replace(GPT_OSS, checkpointing=FULL, compile=True, gpu_attention=True), num_procs=2, context=2
    ),
    "gpt-oss-adapters-fsdp2-ep2": layout(replace(GPT_OSS, lora=ATTENTION_LORA), num_procs=2, expert=2),
    "glm-fsdp2": layout(GLM, num_procs=2),
    "glm-tp2": layout(GLM, num_procs=2, tensor=2, sequence=False),
    "glm-tp2-sp-ep2": layout(GLM, num_procs=2, tensor=2, expert=2),
    "glm-cp2": layout(GLM, num_procs=2, context=2),
    "adapters-fsdp2": layout(ADAPTERS, num_procs=2),
    "adapters-fsdp2-ep2": layout(ADAPTERS, num_procs=2, expert=2),
    "adapters-fsdp2-ep2-full-ac": layout(replace(ADAPTERS, checkpointing=FULL), num_procs=2, expert=2),
    "adapters-replicate2": layout(ADAPTERS, num_procs=2, data_replicate=2),
    "adapters-tp2-sp-ep2": layout(ADAPTERS, num_procs=2, tensor=2, expert=2),
    "adapters-tp2": layout(ADAPTERS, num_procs=2, tensor=2, sequence=False),
    "chunked-fsdp2-ep2": layout(replace(MANY, tokens_per_row=LONG_ROW), num_procs=2, expert=2),
    "chunked-tp2-sp-ep2": layout(replace(MANY, tokens_per_row=LONG_ROW), num_procs=2, tensor=2, expert=2),
}
"""Those in float32."""

BFLOAT16_LAYOUTS = {
    "bfloat16-fsdp2-ep2": layout(ALONE["moe, bfloat16"], num_procs=2, expert=2),
    "bfloat16-tp2-sp-ep2": layout(ALONE["moe, bfloat16"], num_procs=2, tensor=2, expert=2),
}

NEAR = dict.fromkeys(("moe, bfloat16", *BFLOAT16_LAYOUTS), "moe, small step") | {
    "moe, bfloat16, varlen": "moe, bfloat16",
    "gpt-oss, bfloat16, varlen": "gpt-oss, small step",
}
"""Which case of ``ALONE`` a case in bfloat16 is close to."""

REPRESENTATIVE = {
    *(name for name, case in ALONE.items() if not case.compile),
    "fsdp2",
    "fsdp2-ep2",
    "replicate2",
    "tp2-sp-ep2",
    "cp2",
    "cp2-varlen",
    "hsdp2x2",
    "fsdp2-tp2-sp-ep2",
    "dense-tp2-sp",
    *(name for name, case in LAYOUTS.items() if case.model in FAMILIES and not case.compile),
    "adapters-fsdp2-ep2",
    "adapters-replicate2",
    "adapters-tp2-sp-ep2",
    "chunked-fsdp2-ep2",
    *BFLOAT16_LAYOUTS,
}
"""Every parallelism once, and two of them together: the others are for ``make test-all``."""

Launch = Callable[[str], list[Outcome]]


def unrecorded(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    return [replace(sequence, expert_ids_SMK=None) for sequence in sequences]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    root = tmp_path_factory.mktemp("models")
    folders = {
        "moe": write_tiny_model(root / "moe", scale=4.0, num_experts=8, top_k=3),
        "dense": write_family(root / "dense", "qwen3_tied"),
        **{name: write_family(root / name, name) for name in FAMILIES},
    }
    facts = {name: read_model_facts(str(folder)) for name, folder in folders.items()}
    moe = make_sequences(11, facts["moe"])
    sequences = {
        "moe": moe,
        "many": make_sequences(90, facts["moe"]),
        "unrecorded": unrecorded(moe),
        **{name: unrecorded(make_sequences(11, facts[name])) for name in ("dense", *FAMILIES)},
    }
    return Inputs(folders=folders, sequences=sequences)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


def marked(names: Iterable[str]) -> list[ParameterSet]:
    return [
        pytest.param(name, marks=[] if name in REPRESENTATIVE else pytest.mark.exhaustive) for name in names
    ]


@pytest.fixture(scope="module")
def launch(inputs: Inputs, exported: Path) -> Launch:
    """A case's outcomes by rank. One launch takes the steps of all cases with as many processes and its mark.

    A launch that has failed is not tried again: each of its tests fails with what it said.
    """
    cases = ALONE | LAYOUTS | BFLOAT16_LAYOUTS
    for name in ("fsdp2-ep2", "fsdp2-ep2-offload"):
        cases[name] = replace(cases[name], export=exported / name)
    done: dict[str, list[Outcome]] = {}
    failed: dict[str, ProcessFailed] = {}

    def outcomes(name: str) -> list[Outcome]:
        if name in failed:
            raise failed[name]
        if name not in done:
            num_procs = cases[name].parallel.num_procs
            beside = {
                other: case
                for other, case in cases.items()
                if case.parallel.num_procs == num_procs
                and (other in REPRESENTATIVE) == (name in REPRESENTATIVE)
            }
            try:
                by_rank = run_ranks(num_procs, take_steps, inputs, beside)
            except ProcessFailed as failure:
                failed.update(dict.fromkeys(beside, failure))
                raise
            done.update({other: [of_rank[other] for of_rank in by_rank] for other in beside})
        return done[name]

    return outcomes


def reference_of(case: Case) -> str:
    """Which case of ``ALONE`` is the same step without anything that must not show."""
    plain = replace(
        case,
        parallel=ParallelSection(),
        checkpointing=ActivationCheckpointing.NONE,
        compile=False,
        cpu_offload=False,
        gpu_attention=False,
        tokens_per_row=TOKENS_PER_ROW,
    )
    return next(name for name, alone in ALONE.items() if alone == plain)


def relative_errors(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Norm of the difference by norm, of every tensor."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1e-30))
        for name, tensor in expected.items()
    }


def cosine(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Of all tensors as one vector."""
    vectors = [torch.cat([of_one[name].flatten() for name in expected]) for of_one in (found, expected)]
    return float(torch.cosine_similarity(*vectors, dim=0))


def assert_same_tokens(found: TokenValues, expected: TokenValues) -> None:
    for field in fields(TokenValues):
        mine, other = getattr(found, field.name), getattr(expected, field.name)
        if other is None or other.dtype != np.float32:
            np.testing.assert_array_equal(mine, other, err_msg=field.name)
        else:
            np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-4, err_msg=field.name)


def assert_same_reports(found: Iterable[Outcome], expected: Outcome) -> None:
    report = merged_reports([outcome.tokens for outcome in found])
    assert [one.key for one in report.branches] == [one.key for one in expected.tokens.branches]
    assert len(expected.tokens.branches) == 4 and len(expected.tokens.worst) == NUM_WORST
    for mine, other in zip(report.branches, expected.tokens.branches, strict=True):
        np.testing.assert_array_equal(mine.prompt_ids_P, other.prompt_ids_P)
        np.testing.assert_array_equal(mine.response_ids_T, other.response_ids_T)
        assert_same_tokens(mine.values, other.values)
    assert [one.rank[1:] for one in report.worst] == [one.rank[1:] for one in expected.tokens.worst]
    for worst, other in zip(report.worst, expected.tokens.worst, strict=True):
        assert_same_tokens(worst.values, other.values)


@pytest.mark.parametrize("name", marked(LAYOUTS))
def test_a_step_is_the_same_under_every_layout(launch: Launch, name: str) -> None:
    """Tokens are reported once: the worst of all ranks, and every token of what was asked for."""
    case = LAYOUTS[name]
    (expected,) = launch(reference_of(case))
    outcomes = launch(name)
    if case.sequences != "many":
        assert_same_reports(outcomes, expected)
    for found in outcomes:
        assert found.keeps_base
        for metric in ("loss", "grad_norm", "policy/entropy", "mismatch/kl", "objective/clipped_share"):
            assert found.metrics[metric] == pytest.approx(expected.metrics[metric], rel=TOLERANCE), metric
        errors = relative_errors(found.gradients, expected.gradients)
        assert max(errors.values()) < TOLERANCE, max(errors, key=errors.__getitem__)
        # A step is at most as long as the learning rate.
        for weight, tensor in expected.weights.items():
            torch.testing.assert_close(
                found.weights[weight], tensor, atol=2e-3 * LEARNING_RATE, rtol=0, msg=weight
            )
        if "routing/disagreement_share" in expected.metrics:
            for metric in ("routing/disagreement_share", "routing/recorded_share"):
                assert found.metrics[metric] == pytest.approx(expected.metrics[metric], rel=TOLERANCE)
    if case.parallel.data_replicate * case.parallel.data_shard > 1:
        assert len({outcome.num_rows for outcome in outcomes}) > 1, "a data rank has fewer rows"


@pytest.mark.parametrize(
    "name", marked(name for name, case in (ALONE | LAYOUTS).items() if case.model == "moe" and not case.lora)
)
def test_replaying_own_choices_changes_no_bit(launch: Launch, name: str) -> None:
    assert all(outcome.replays_exactly for outcome in launch(name))


def test_every_parameter_has_a_gradient_and_moves(inputs: Inputs, launch: Launch) -> None:
    """Else nothing would be compared. Biases of routers have none, and move by the load."""
    cases = {"moe": MOE, "dense": DENSE, "llama": LLAMA, "deepseek": DEEPSEEK, "glm": GLM}
    for name, case in cases.items():
        folder = inputs.folders[case.model]
        left_out = untrained_tensors(folder, read_model_facts(str(folder)))
        before = load_file(folder / "model.safetensors")
        before = {weight: tensor for weight, tensor in before.items() if weight not in left_out}
        (outcome,) = launch(name)
        assert outcome.weights.keys() == before.keys()
        assert outcome.gradients.keys() == {one for one in before if not one.endswith("correction_bias")}
        for weight, tensor in before.items():
            if name in ("deepseek", "glm") and ".experts." in weight:
                continue  # one may have got no token
            assert weight not in outcome.gradients or outcome.gradients[weight].any(), weight
            assert not torch.equal(outcome.weights[weight], tensor), weight


def test_records_and_chunks_are_used(inputs: Inputs, launch: Launch) -> None:
    forced, own = (launch(name)[0].metrics for name in ("moe", "moe, own routing"))
    assert abs(forced["loss"] - own["loss"]) > 1e-4
    # Random triples of 8 experts: one in 56 is the router's own.
    assert 0.9 < forced["routing/disagreement_share"] < 1.0
    assert 0.6 < forced["routing/recorded_share"] < 0.95
    assert own["routing/recorded_share"] == 0.0 and "routing/disagreement_share" not in own
    lengths = [len(sequence.response_ids_T) for sequence in inputs.sequences["many"]]
    # Rows are assigned evenly: even half of a batch over two ranks is more than one chunk.
    assert sum(lengths[:-1]) / 2 > 1024


@pytest.mark.parametrize("name", NEAR)
def test_steps_in_bfloat16(launch: Launch, name: str) -> None:
    """Near to the same in float32, or by other attention. TorchTitan rounds sums over ranks to bfloat16."""
    (expected,) = launch(NEAR[name])
    for found in launch(name):
        assert found.replays_exactly is not False
        assert found.metrics["loss"] != expected.metrics["loss"]
        assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=3e-2)
        assert cosine(found.gradients, expected.gradients) > 0.99


def test_float32_masters_step(launch: Launch) -> None:
    half, exact = launch("moe, bfloat16")[0], launch("moe, small step")[0]
    assert {tensor.dtype for tensor in half.weights.values()} == {torch.float32}
    # A bfloat16 master would round most of so small a step away, and be off by 1e-3 of the weight.
    for name, tensor in exact.weights.items():
        torch.testing.assert_close(half.weights[name], tensor, atol=5e-6, rtol=0, msg=name)


@pytest.mark.exhaustive
def test_compiled(launch: Launch) -> None:
    """One graph a layer (fullgraph)."""
    eager, compiled = launch("moe")[0], launch("moe, compiled")[0]
    for metric in ("loss", "grad_norm"):
        assert compiled.metrics[metric] == pytest.approx(eager.metrics[metric], rel=TOLERANCE)
    errors = relative_errors(compiled.gradients, eager.gradients)
    assert max(errors.values()) < TOLERANCE, max(errors, key=errors.__getitem__)
    assert_same_reports([compiled], eager)
    (eager,) = launch("moe, bfloat16, full AC")
    (compiled,) = launch("moe, bfloat16, full AC, compiled")
    for metric in ("loss", "grad_norm"):
        assert compiled.metrics[metric] == pytest.approx(eager.metrics[metric], rel=2e-2)
    assert cosine(compiled.gradients, eager.gradients) > 0.99


@pytest.mark.exhaustive
def test_adapters_compiled_and_in_bfloat16(launch: Launch) -> None:
    """Adapters stay float32; the frozen rest is kept in the compute dtype."""
    exact, half = launch("adapters")[0], launch("adapters, bfloat16, full AC, compiled")[0]
    assert exact.frozen_dtypes == {torch.float32} and half.frozen_dtypes == {torch.bfloat16}
    assert {tensor.dtype for tensor in half.weights.values()} == {torch.float32}
    assert half.metrics["loss"] == pytest.approx(exact.metrics["loss"], rel=2e-2)
    assert cosine(half.gradients, exact.gradients) > 0.995


@pytest.mark.exhaustive
def test_offloaded_weights_are_published_and_saved_as_others(launch: Launch, exported: Path) -> None:
    """Against the same layout without, bit for bit. On a CPU nothing moves, but FSDP2 goes its other way."""
    for plain, offloaded in zip(launch("fsdp2-ep2"), launch("fsdp2-ep2-offload"), strict=True):
        assert offloaded.published == plain.published
        assert all(torch.equal(offloaded.weights[name], tensor) for name, tensor in plain.weights.items())
    saved, expected = (
        load_file(exported / name / "model-00001-of-00001.safetensors")
        for name in ("fsdp2-ep2-offload", "fsdp2-ep2")
    )
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
