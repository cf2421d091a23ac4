"""Rehearsals: the rule that makes one of a config, its tiny model, and what it says was exercised."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from forgeasync.config import (
    Dtype,
    GeneratorSection,
    HostCounts,
    HostNames,
    HuggingFaceSource,
    ModelFacts,
    ParallelSection,
    ProcessLauncher,
    RunConfig,
    SshLauncher,
    check_gpus,
    default_name,
    load_config,
    named_sources,
)
from forgeasync.environments import Response
from forgeasync.models import (
    NUM_CHARACTER_TOKENS,
    SHIPPED_MODELS,
    check_checkpoint_shapes,
    check_config,
    parse_model_facts,
    read_model_facts,
)
from forgeasync.observability import RunDir
from forgeasync.planning import (
    GENERATED,
    GIB,
    Capacity,
    Rehearsal,
    Stage,
    Verdict,
    findings,
    largest_part,
    needed_bytes,
    rehearsed,
    score,
    small_facts,
    write_model,
)
from forgeasync.rollouts import FinishReason, PromptEncoder, Task
from forgeasync.schema import ConfigError
from forgeasync.testing import tiny_config
from tests.support.config_samples import CONFIGS, FACTS, minimal_config
from tests.support.families import VARIANTS, config_json, load_family

ROOMY = Capacity(memory_bytes=2000 * GIB, num_gpus=0)
LARGE = CONFIGS / "qwen3_30b_a3b.yaml"
SLURM = CONFIGS / "launchers" / "slurm.yaml"


def stage(capacity: Capacity | None = ROOMY, *, num_gpus: int = 0, longest_prompt: int = 150) -> Stage:
    return Stage(
        folder=Path("runs/x-rehearsal"),
        capacity=capacity,
        num_gpus=num_gpus,
        local_paths=frozenset(),
        longest_prompt=longest_prompt,
    )


def facts_of(config: RunConfig) -> ModelFacts:
    shipped = SHIPPED_MODELS / config.model.path.replace("/", "--")
    if shipped.is_dir():
        return read_model_facts(str(shipped))
    return dataclasses.replace(FACTS, max_position_embeddings=8192)


def assert_legal(rehearsal: Rehearsal, *, num_gpus: int = 0) -> None:
    config = rehearsal.config
    assert [str(problem) for problem in check_config(config, rehearsal.facts)] == []
    assert [str(problem) for problem in check_gpus(config, num_gpus)] == []
    # What was copied is what validation lets through.
    assert RunConfig.model_validate_json(config.model_dump_json(), strict=True) == config


def degrees(config: RunConfig) -> tuple[int, ...]:
    parallel, generator = config.trainer.parallel, config.generator
    return (parallel.tensor, parallel.context, parallel.expert, generator.tensor_parallel)


def rehearsal_of(
    *overrides: str, facts: ModelFacts = FACTS, local_paths: frozenset[str] = frozenset()
) -> Rehearsal:
    """A legal config's legal rehearsal, where there is room."""
    config = minimal_config(*overrides)
    assert check_config(config, facts) == []
    rehearsal = rehearsed(config, facts, dataclasses.replace(stage(), local_paths=local_paths))
    assert_legal(rehearsal)
    return rehearsal


def untried(rehearsal: Rehearsal) -> dict[str, str | None]:
    """What was left out, by field."""
    return {change.field: change.untried for change in rehearsal.changes}


TAUGHT = {"distill_cpu", "self_distill_cpu"}
REFUSED = {"serve_cpu", *TAUGHT}
"""People do not come to a rehearsal (tests/plugins/serve/test_rules.py), nor do teachers."""

REHEARSED = [file for file in sorted(CONFIGS.glob("*.yaml")) if file.stem not in REFUSED]


def test_teachers_are_refused() -> None:
    for name in TAUGHT:
        with pytest.raises(ConfigError, match=r"teachers.*must be left out of a rehearsal"):
            rehearsed(load_config(CONFIGS / f"{name}.yaml"), FACTS, stage())


@pytest.mark.parametrize("overlay", [None, "slurm", "process"])
@pytest.mark.parametrize("file", REHEARSED, ids=lambda file: file.stem)
def test_every_config_is_rehearsed_whole_where_there_is_room(file: Path, overlay: str | None) -> None:
    overlays = [] if overlay is None else [CONFIGS / "launchers" / f"{overlay}.yaml"]
    overrides = []
    if overlay == "slurm":
        is_on_gpus = not file.stem.endswith("_cpu")
        plain = load_config([file], [])
        is_even = plain.trainer.parallel.num_procs % 2 == plain.generator.num_replicas % 2 == 0
        num_hosts = 2 if is_even else 1
        overrides = [
            f"launcher.gpus_per_host={1024 if is_on_gpus else 0}",
            f"launcher.hosts={{trainer: {num_hosts}, generators: {num_hosts}}}",
        ]
    config = load_config([file, *overlays], overrides)
    assert not check_config(config, facts_of(config))
    rehearsal = rehearsed(config, facts_of(config), stage())
    assert_legal(rehearsal)
    small = rehearsal.config
    assert degrees(small) == degrees(config)
    assert small.trainer.parallel == config.trainer.parallel
    assert small.generator.num_replicas == config.generator.num_replicas
    for key in ("weights", "accounting", "lora", "max_off_policy_steps", "seed"):
        assert getattr(small, key) == getattr(config, key), key
    assert small.algorithm.objective == config.algorithm.objective
    assert small.algorithm.corrections == config.algorithm.corrections
    assert (small.trainer.dtype, small.generator.dtype) == (config.trainer.dtype, config.generator.dtype)
    assert small.max_steps == 3 and small.evaluation.every_steps <= 3
    if config.environment is None:
        assert small.model.max_context_length <= 256
    if overlay is not None:
        assert isinstance(small.launcher, ProcessLauncher)
        assert small.launcher.hosts == config.launcher.hosts
    assert small.run_dir == "runs/x-rehearsal"
    assert rehearsal.facts.num_layers - rehearsal.facts.num_dense_layers in (0, 2)
    assert rehearsal.facts.num_layers <= 3


def _listed(text: object, found: dict[str, object], path: str = "") -> dict[str, object]:
    if isinstance(text, list):
        text = dict(enumerate(text))
    if isinstance(text, dict):
        for key, value in text.items():
            _listed(value, found, f"{path}.{key}" if path else key)
    else:
        found[path] = text
    return found


@pytest.mark.parametrize("file", REHEARSED, ids=lambda file: file.stem)
def test_nothing_is_changed_in_silence(file: Path) -> None:
    config = load_config([file, SLURM], ["generator.num_replicas=4"])
    whole = needed_bytes(config, largest_part(config, None), on_gpus=False)
    rehearsal = rehearsed(config, facts_of(config), stage(Capacity(memory_bytes=whole - 1, num_gpus=0)))
    assert rehearsal.config.generator.num_replicas < 4
    before = _listed(config.model_dump(mode="json"), {})
    after = _listed(rehearsal.config.model_dump(mode="json"), {})
    named = [change.field for change in rehearsal.changes]
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            assert any(key == name or key.startswith(f"{name}.") for name in named), key
    assert all(change.before != change.after and change.why for change in rehearsal.changes)


def test_a_machine_with_less_memory_rehearses_fewer_replicas_with_the_same_degrees() -> None:
    config = load_config([LARGE], [])
    facts = facts_of(config)
    whole = needed_bytes(config, largest_part(config, None), on_gpus=False)
    assert 20 * GIB < whole < 32 * GIB
    last = None
    for gib in (whole / GIB, 24, 20, 16, 13):
        capacity = Capacity(memory_bytes=round(gib * GIB), num_gpus=0)
        rehearsal = rehearsed(config, facts, stage(capacity))
        assert_legal(rehearsal)
        assert degrees(rehearsal.config) == degrees(config)
        part = largest_part(config, capacity)
        assert needed_bytes(config, part, on_gpus=False) <= capacity.memory_bytes
        size = (part.num_replicas, part.parallel.num_procs)
        assert last is None or size <= last
        last = size
        if part.num_replicas < 8:
            assert untried(rehearsal)["generator.num_replicas"] == f"8 generators, only {part.num_replicas}"
    assert last == (2, 8), "replicas go first, then data-parallel groups down to the expert-parallel degree"


def test_a_machine_that_is_too_small_is_refused_with_its_figures() -> None:
    config = load_config([LARGE], [])
    capacity = Capacity(memory_bytes=6 * GIB, num_gpus=0)
    with pytest.raises(ConfigError, match=r"8 trainer processes and one engine of 2; it needs .* has 6 GiB"):
        rehearsed(config, facts_of(config), stage(capacity))


LARGE_ON_SLURM = load_config([LARGE, SLURM])


def test_hosts_are_fewer_only_if_procs_do_not_spread_over_them() -> None:
    capacity = Capacity(memory_bytes=22 * GIB, num_gpus=0)
    small = rehearsed(LARGE_ON_SLURM, facts_of(LARGE_ON_SLURM), stage(capacity)).config
    assert small.generator.num_replicas == 3
    assert small.launcher == ProcessLauncher(kind="process", hosts=HostCounts(trainer=2, generators=1))


def test_on_its_own_hosts_nothing_is_left_out_and_gpus_are_used() -> None:
    config, facts = LARGE_ON_SLURM, facts_of(LARGE_ON_SLURM)
    rehearsal = rehearsed(config, facts, stage(None))
    small = rehearsal.config
    assert check_config(small, rehearsal.facts) == []
    assert small.launcher == config.launcher and small.timeouts == config.timeouts
    assert small.trainer.parallel == config.trainer.parallel
    assert small.generator.compile is config.generator.compile is True
    assert rehearsal.facts.head_dim == 128, "kernels are chosen by it"
    names = HostNames(trainer=("a",), generators=("b",))
    cpus = config.model_copy(update={"launcher": SshLauncher(kind="ssh", hosts=names, gpus_per_host=0)})
    assert not rehearsed(cpus, facts, stage(None)).config.generator.compile


def test_a_machine_with_gpus_rehearses_what_they_hold() -> None:
    config = load_config([LARGE, SLURM], ["trainer.parallel.expert=2"])
    gpus = Capacity(memory_bytes=500 * GIB, num_gpus=8)
    rehearsal = rehearsed(config, facts_of(config), stage(gpus, num_gpus=8))
    assert_legal(rehearsal, num_gpus=8)
    small = rehearsal.config
    assert small.launcher.kind == "local" and small.generator.compile
    assert (small.trainer.parallel.num_procs, small.generator.num_replicas) == (4, 2)


@given(st.data())
def test_any_legal_layout_has_a_legal_rehearsal(data: st.DataObject) -> None:
    draw = data.draw
    power = st.sampled_from([1, 2, 4, 8])
    config = load_config([LARGE], [])
    facts = facts_of(config)
    if draw(st.booleans()):
        variant = draw(st.sampled_from(sorted(VARIANTS)))
        facts = parse_model_facts(config_json(variant) | {"vocab_size": 200}, variant)
        facts = dataclasses.replace(facts, max_position_embeddings=40960)
    if facts.num_experts and facts.routing is None:
        facts = dataclasses.replace(facts, num_experts=draw(st.sampled_from([6, 8, 60, 128])))
    tensor, context, shard, replicate = draw(power), draw(power), draw(power), draw(power)
    expert = draw(power) if facts.num_experts else 1
    parallel = ParallelSection(
        num_procs=tensor * context * shard * replicate,
        data_replicate=replicate,
        tensor=tensor,
        context=context,
        expert=expert,
        sequence=expert > 1 or not facts.num_experts,
    )
    trainer = config.trainer.model_copy(update={"parallel": parallel, "steps_per_batch": draw(power)})
    generator = config.generator.model_copy(
        update={
            "tensor_parallel": draw(power),
            "num_replicas": draw(st.integers(1, 9)),
            "dtype": config.generator.dtype if facts.routing is None else Dtype.FLOAT32,
        }
    )
    sampling = config.sampling.model_copy(
        update={"top_k": draw(st.sampled_from([0, 20, 5000])), "top_p": draw(st.sampled_from([1.0, 0.001]))}
    )
    config = config.model_copy(update={"trainer": trainer, "generator": generator, "sampling": sampling})
    before = [str(problem) for problem in check_config(config, facts)]
    sampled = ("sampling", "payload.capacity_gib")
    if [problem for problem in before if not problem.startswith(sampled)]:
        return
    rehearsal = rehearsed(config, facts, stage(longest_prompt=draw(st.integers(1, 3000))))
    assert_legal(rehearsal)
    small = rehearsal.facts
    assert degrees(rehearsal.config) == degrees(config)
    assert (small.num_experts > 0) == (facts.num_experts > 0)
    ranks = shard * context * tensor
    assert (small.num_experts >= ranks) == (facts.num_experts >= ranks) or not facts.num_experts
    engine = generator.tensor_parallel
    assert (small.num_kv_heads % engine == 0) == (facts.num_kv_heads % engine == 0)
    assert small.num_experts <= facts.num_experts and small.num_heads <= facts.num_heads


def test_hub_data_is_generated_and_local_data_stays() -> None:
    hub = "source: {kind: huggingface, path: %s, question_field: q, answer_field: a}, weight: 2.0"
    sources = ", ".join(f"{{{hub % path}}}" for path in ("a/b", "problems.jsonl", "c/d"))
    rehearsal = rehearsal_of(
        "data.source=null", f"data.sources=[{sources}]", local_paths=frozenset({"problems.jsonl"})
    )
    here = HuggingFaceSource(kind="huggingface", path="problems.jsonl", question_field="q", answer_field="a")
    now = named_sources(rehearsal.config.data)
    assert [source.source for source in now] == [GENERATED, here, GENERATED]
    assert [source.name for source in now] == ["a/b", default_name(here), "c/d"]
    assert {source.weight for source in now} == {2.0}
    left_out = [change.untried for change in rehearsal.changes]
    assert {"the data set a/b and its fields", "the data set c/d and its fields"} <= set(left_out)


def test_verifiers_stay_beside_a_score_that_differs() -> None:
    config = rehearsal_of("algorithm.filters=[{kind: dynamic_sampling}]").config
    (source,) = named_sources(config.data)
    assert [reward.kind for reward in source.rewards] == ["reasoning_gym", "python"]
    assert [one.kind for one in config.algorithm.filters] == ["dynamic_sampling"]


def test_made_up_scores_depend_on_the_text_alone_and_differ() -> None:
    task = Task(task_id="1", source="a", source_index=0, prompt="p", answer="1")
    texts = [f"text {index}" for index in range(200)]
    scores = [score(task, Response(text, 5, FinishReason.STOP)) for text in texts]
    assert scores == [score(task, Response(text, 9, FinishReason.LENGTH)) for text in texts]
    assert set(scores) == {index / 10 for index in range(11)}


SAMPLING = "algorithm.filters=[{kind: dynamic_sampling}]"
REWARD, ENVIRONMENT = "tests.support.own_rewards.length_reward", "tests.support.environments.TryAgain"
OWN_REWARD = f"data.reward={{kind: python, factory: {REWARD}, name: mine}}"
OWN_ENVIRONMENT = f"environment={{kind: python, factory: {ENVIRONMENT}}}"
CONSTANT = "algorithm.aggregation={kind: constant_length, length: 64}"
SOURCE = "{kind: huggingface, path: a/b, question_field: q, answer_field: a}"
A_SET = f"evaluation.sets=[{{name: s, source: {SOURCE}, num_problems: 30}}]"
DEPTHS = (
    *("algorithm.groups_per_step=32", "max_off_policy_steps=2", "buffer.max_groups=64"),
    "buffer.max_in_flight=16",
)
LONG = ("sampling.max_response_tokens=8192", "model.max_context_length=9000", "trainer.tokens_per_row=9000")


def overlong(max_length: int, share: float) -> str:
    return f"algorithm.filters=[{{kind: overlong_penalty, max_length: {max_length}, buffer_share: {share}}}]"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # Rewards of one's own are neither changed nor added to, and an environment scores by itself.
        ([OWN_REWARD, SAMPLING], {"data.reward.factory": REWARD, "algorithm.filters.0.kind": None}),
        ([OWN_ENVIRONMENT, SAMPLING], {"data.reward": None, "algorithm.filters.0.kind": None}),
        # Prompts are the environment's own.
        ([OWN_ENVIRONMENT, CONSTANT], {"algorithm.aggregation.length": 1024}),
        ([OWN_ENVIRONMENT, A_SET], {"evaluation.sets.0.num_problems": 8, "evaluation.sets.0.reward": None}),
        ([OWN_ENVIRONMENT, A_SET], {"evaluation.sets.0.source.kind": GENERATED.kind}),
        # Depths hold as many batches.
        (DEPTHS, {"algorithm.groups_per_step": 2, "buffer.max_groups": 4, "buffer.max_in_flight": 1}),
        # Penalties for length begin at the same share of responses.
        ([*LONG, overlong(9900, 0.2)], {"algorithm.filters.0.max_length": 38}),
        # By its share alone it would be 45, and begin after 32 tokens: never.
        ([*LONG, overlong(11520, 0.28894)], {"algorithm.filters.0.max_length": 44}),
        # It is no run in anybody's project.
        (["logging.wandb={project: numbers}"], {"logging.wandb": None}),
    ],
)
def test_what_becomes_of_a_config(overrides: Sequence[str], expected: dict[str, object]) -> None:
    facts = dataclasses.replace(FACTS, max_position_embeddings=9000)
    found = _listed(rehearsal_of(*overrides, facts=facts).config.model_dump(mode="json"), {})
    assert {key: found.get(key) for key in expected} == expected
    for key in (key for key, value in expected.items() if value is None):
        assert not [one for one in found if one.startswith(f"{key}.")], f"{key} is a section"


# --- the tiny model's folder ---

SHIPPED = {folder.name: folder / "config.json" for folder in sorted(SHIPPED_MODELS.iterdir())}


@pytest.mark.parametrize("name", [*sorted(VARIANTS), *SHIPPED])
def test_a_folder_is_a_model_of_its_family(name: str, tmp_path: Path) -> None:
    raw = json.loads(SHIPPED[name].read_text()) if name in SHIPPED else config_json(name)
    if "layer_types" in raw and not raw.get("sliding_window"):
        # More layers than the tiny model has.
        raw |= {"num_hidden_layers": 5, "layer_types": [raw["layer_types"][0], *["full_attention"] * 4]}
    facts = small_facts(
        parse_model_facts(raw, name),
        ParallelSection(num_procs=4, expert=2 if "moe" in name or "-A" in name else 1),
        GeneratorSection(tensor_parallel=2),
        max_context_length=192,
        on_gpus=False,
    )
    folder = tmp_path / "model"
    write_model(folder, raw, facts, chat_template=True, template_arguments=["enable_thinking"], seed=3)
    assert read_model_facts(str(folder)) == facts
    assert check_checkpoint_shapes(folder, facts) == []
    model, loading = load_family(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = PromptEncoder(tokenizer, chat_template=True, template_arguments={"enable_thinking": False})
    ids = torch.from_numpy(prompts.encode("1 + 1 =")).long()[None]
    with torch.no_grad():
        logits_V = model(ids).logits[0, -1]
    assert logits_V.shape == (facts.vocab_size,) == (NUM_CHARACTER_TOKENS,)
    # A random model's: neither all alike nor nearly certain.
    assert 0.1 < float(logits_V.std()) < 10.0


# --- what a rehearsal says was exercised ---

RIGHT: dict[str, float] = {
    "metrics/num_nonfinite": 0,
    "trainer/num_skipped_steps": 0,
    "grad_norm": 0.7,
    "off_policy/age_max": 0,
    "mismatch/logprob_abs_mean": 1e-6,
    "weights/num_swaps": 1,
    "weights/num_bytes_moved": 4096,
    "weights/num_bad_blocks": 0,
    "weights/num_expired_leases": 0,
    "weights/num_skipped_versions": 0,
    "generator/num_crossing": 2,
    "generator/num_resumed": 0,
    "routing/recorded_share": 1.0,
    "routing/disagreement_share": 0.0,
    "payload/num_read_shared": 8,
    "payload/num_read_remote": 0,
    "payload/bytes_per_token": 40.0,
    "dropped/stale": 1,
    "dropped/bad_record": 0,
    "scoring/num_timeouts": 0,
    "reward/mean": 0.5,
    "memory/trainer_gib": 0.6,
    "time/step_s": 1.0,
}
CHECKPOINT_FILES = ("step-00000002/run.json", "final/config.json")
EVALUATED: dict[str, float] = {"eval/accuracy": 0.0, "eval/num_unscored": 0}


def write_rehearsed(folder: Path, changes: dict[int, dict[str, float]], *, num_steps: int = 3) -> RunDir:
    lines = [{"step": 0, **EVALUATED, "metrics/num_nonfinite": 0}]
    for step in range(1, num_steps + 1):
        evaluated = EVALUATED if step in (2, 3) else {}
        lines.append({"step": step, **RIGHT, **evaluated, **changes.get(step, {})})
    folder.mkdir(parents=True)
    run_dir = RunDir(path=folder)
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("trainer-0", "trainer-1", "generator-0", "scorer-0", "buffer-0", "controller"):
        run_dir.log(name).parent.mkdir(exist_ok=True)
        run_dir.log(name).touch()
    for file in CHECKPOINT_FILES:
        (run_dir.checkpoints / file).parent.mkdir(parents=True)
        (run_dir.checkpoints / file).touch()
    return run_dir


def verdicts_of(run_dir: RunDir, *, checkpoint_every: int | None = 2) -> dict[str, Verdict]:
    config = tiny_config(Path("model"))
    evaluation = config.evaluation.model_copy(update={"every_steps": 2})
    checkpoint = config.checkpoint.model_copy(update={"every_steps": checkpoint_every})
    config = config.model_copy(update={"evaluation": evaluation, "checkpoint": checkpoint})
    found = findings(config, FACTS, run_dir)
    assert len({finding.part for finding in found}) == len(found)
    return {finding.part: finding.verdict for finding in found}


def test_a_run_that_went_well(tmp_path: Path) -> None:
    verdicts = verdicts_of(write_rehearsed(tmp_path / "run", {}))
    assert Verdict.FAILED not in verdicts.values()
    untried = {part for part, verdict in verdicts.items() if verdict is Verdict.NOT_EXERCISED}
    assert untried == {"replay of kept tokens", "resuming", "memory and speed of the run", "GPUs"}


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("steps", {"trainer/num_skipped_steps": 1}),
        ("steps", {"metrics/num_nonfinite": 1}),
        ("age of tokens", {"off_policy/age_max": 1}),
        ("publish, fetch, swap", {"weights/num_bad_blocks": 1}),
        ("publish, fetch, swap", {"weights/num_expired_leases": 1}),
        ("replay of routed experts", {"routing/recorded_share": 0.99}),
        ("groups", {"dropped/bad_record": 1}),
        ("scores", {"scoring/num_timeouts": 1}),
        ("evaluation", {"eval/num_unscored": 1}),
    ],
)
def test_what_went_wrong_last_has_failed(tmp_path: Path, part: str, change: dict[str, float]) -> None:
    verdicts = verdicts_of(write_rehearsed(tmp_path / "run", {3: change}))
    assert [name for name, verdict in verdicts.items() if verdict is Verdict.FAILED] == [part]


def test_what_is_missing_has_failed(tmp_path: Path) -> None:
    no_swap = {step: {"weights/num_swaps": 0} for step in (1, 2)}
    run_dir = write_rehearsed(tmp_path / "run", no_swap, num_steps=2)
    for name in ("trainer-1", "generator-0", "scorer-0"):
        run_dir.log(name).unlink()
    for file in CHECKPOINT_FILES:
        (run_dir.checkpoints / file).unlink()
    verdicts = verdicts_of(run_dir)
    failed = {part for part, verdict in verdicts.items() if verdict is Verdict.FAILED}
    processes = {"trainer processes", "generators", "other roles"}
    assert failed == processes | {"steps", "publish, fetch, swap", "evaluation", "checkpoint", "export"}


def test_what_a_run_had_no_use_for_is_not_exercised(tmp_path: Path) -> None:
    equal_rewards = {step: {"grad_norm": 0.0} for step in (1, 2, 3)}
    assert verdicts_of(write_rehearsed(tmp_path / "a", equal_rewards))["gradient"] is Verdict.NOT_EXERCISED
    without = verdicts_of(write_rehearsed(tmp_path / "b", {}), checkpoint_every=None)
    assert without["checkpoint"] is Verdict.NOT_EXERCISED


@pytest.mark.parametrize(
    ("roles", "verdict"), [(("trainer", "generator"), Verdict.EXERCISED), (("trainer",), Verdict.FAILED)]
)
def test_gpus_count_where_memory_is_used(tmp_path: Path, roles: tuple[str, ...], verdict: Verdict) -> None:
    memory = {f"memory/{role}_gpu_gib": 1.0 for role in roles}
    assert verdicts_of(write_rehearsed(tmp_path / "run", {1: memory}))["GPUs"] is verdict
