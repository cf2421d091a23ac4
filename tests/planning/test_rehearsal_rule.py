"""The rule by which a config becomes a rehearsal: legal, of the same topology, and small."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.config import (
    Dtype,
    GeneratorSection,
    HostCounts,
    HostNames,
    HuggingFaceSource,
    ModelFacts,
    ParallelSection,
    ProcessLauncher,
    PythonReward,
    RunConfig,
    SshLauncher,
    check_gpus,
    default_name,
    load_config,
    named_sources,
)
from forgeasync.environments import Response
from forgeasync.models import FAMILIES, SHIPPED_MODELS, check_config, parse_model_facts, read_model_facts
from forgeasync.planning import (
    GENERATED,
    GIB,
    Capacity,
    Rehearsal,
    Stage,
    largest_part,
    needed_bytes,
    rehearsed,
    score,
    small_facts,
)
from forgeasync.rollouts import FinishReason, Task
from forgeasync.schema import ConfigError
from tests.support.config_samples import CONFIGS, FACTS, minimal_config
from tests.support.families import VARIANTS

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


def raw_config(variant: str) -> dict[str, object]:
    raw = json.loads(VARIANTS[variant]().to_json_string())
    return raw | {"architectures": [FAMILIES[raw["model_type"]].architecture]}


TAUGHT = {"distill_cpu", "self_distill_cpu"}
REFUSED = {"serve_cpu", *TAUGHT}
"""People do not come to a rehearsal (tests/plugins/serve/test_refusals.py), nor do teachers."""

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
    assert rehearsal.facts.num_layers == 2


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


@pytest.mark.parametrize(("name", "num_gpus"), [("0.6b_1gpu", 1), ("1.7b_1gpu", 1), ("0.6b_2gpu", 2)])
def test_small_configs_are_rehearsed_on_the_gpus_that_they_need(name: str, num_gpus: int) -> None:
    config = load_config([CONFIGS / f"qwen3_{name}.yaml"])
    gpus = Capacity(memory_bytes=60 * GIB, num_gpus=num_gpus)
    assert_legal(rehearsed(config, facts_of(config), stage(gpus, num_gpus=num_gpus)), num_gpus=num_gpus)


@given(st.data())
def test_any_legal_layout_has_a_legal_rehearsal(data: st.DataObject) -> None:
    draw = data.draw
    power = st.sampled_from([1, 2, 4, 8])
    config = load_config([LARGE], [])
    facts = facts_of(config)
    if draw(st.booleans()):
        variant = draw(st.sampled_from(sorted(VARIANTS)))
        facts = parse_model_facts(raw_config(variant) | {"vocab_size": 200}, variant)
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


@pytest.mark.parametrize(
    ("num_kv_heads", "trainer_ranks", "engine_ranks", "heads"),
    [
        (8, 1, 1, (2, 4)),
        (8, 1, 4, (4, 8)),
        (8, 1, 8, (8, 16)),
        (8, 4, 2, (4, 8)),
        # An engine of more ranks than heads repeats them.
        (4, 2, 8, (2, 8)),
        (4, 4, 16, (4, 16)),
        (32, 2, 4, (4, 4)),
        (1, 1, 4, (1, 4)),
    ],
)
def test_heads_are_divided_and_repeated_as_in_the_model(
    num_kv_heads: int, trainer_ranks: int, engine_ranks: int, heads: tuple[int, int]
) -> None:
    facts = dataclasses.replace(FACTS, num_heads=32, num_kv_heads=num_kv_heads)
    parallel = ParallelSection(num_procs=trainer_ranks, tensor=trainer_ranks)
    generator = GeneratorSection(tensor_parallel=engine_ranks)
    small = small_facts(facts, parallel, generator, max_context_length=64, on_gpus=False)
    assert (small.num_kv_heads, small.num_heads) == heads


@pytest.mark.parametrize(
    ("num_experts", "parallel", "engine_ranks", "experts"),
    [
        (128, ParallelSection(num_procs=4, expert=2), 1, (8, 2)),
        (128, ParallelSection(num_procs=16, expert=8), 1, (16, 4)),
        (60, ParallelSection(num_procs=4, expert=4), 1, (12, 3)),
        (60, ParallelSection(num_procs=1), 5, (10, 2)),
        # Fewer experts than ranks: each expert is sharded.
        (8, ParallelSection(num_procs=16, expert=2), 1, (8, 2)),
        (6, ParallelSection(num_procs=2, expert=2), 1, (6, 1)),
    ],
)
def test_experts_are_as_few_as_ranks_divide(
    num_experts: int, parallel: ParallelSection, engine_ranks: int, experts: tuple[int, int]
) -> None:
    facts = dataclasses.replace(FACTS, num_experts=num_experts, top_k=6, num_heads=20, num_kv_heads=20)
    generator = GeneratorSection(tensor_parallel=engine_ranks, expert_parallel=engine_ranks > 1)
    small = small_facts(facts, parallel, generator, max_context_length=64, on_gpus=False)
    assert (small.num_experts, small.top_k) == experts


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


def test_rewards_of_ones_own_are_neither_changed_nor_added_to() -> None:
    rehearsal = rehearsal_of(
        "data.reward={kind: python, factory: tests.support.own_rewards.length_reward, name: mine}",
        "algorithm.filters=[{kind: dynamic_sampling}]",
    )
    own = PythonReward(factory="tests.support.own_rewards.length_reward", name="mine")
    assert rehearsal.config.data.reward == own
    assert rehearsal.config.algorithm.filters == ()
    assert untried(rehearsal)["algorithm.filters"] == "the filter dynamic_sampling"


def test_verifiers_stay_beside_a_score_that_differs() -> None:
    config = rehearsal_of("algorithm.filters=[{kind: dynamic_sampling}]").config
    (source,) = named_sources(config.data)
    assert [reward.kind for reward in source.rewards] == ["reasoning_gym", "python"]
    assert [one.kind for one in config.algorithm.filters] == ["dynamic_sampling"]


def test_an_environment_scores_by_itself() -> None:
    small = rehearsal_of(
        "environment={kind: python, factory: tests.support.environments.TryAgain}",
        "algorithm.filters=[{kind: dynamic_sampling}]",
        "algorithm.aggregation={kind: constant_length, length: 64}",
        "evaluation.sets=[{name: s, source: {kind: huggingface, path: a/b, question_field: q, "
        "answer_field: a}, num_problems: 30}]",
    ).config
    assert small.environment.factory == "tests.support.environments.TryAgain"
    assert small.data.reward is None and small.algorithm.filters == ()
    (one,) = small.evaluation.sets
    assert (one.source, one.reward, one.num_problems) == (GENERATED, None, 8)
    assert small.model.max_context_length == 1024, "prompts are its own"
    assert small.algorithm.aggregation.length == 1024


def test_made_up_scores_depend_on_the_text_alone_and_differ() -> None:
    task = Task(task_id="1", source="a", source_index=0, prompt="p", answer="1")
    texts = [f"text {index}" for index in range(200)]
    scores = [score(task, Response(text, 5, FinishReason.STOP)) for text in texts]
    assert scores == [score(task, Response(text, 9, FinishReason.LENGTH)) for text in texts]
    assert set(scores) == {index / 10 for index in range(11)}


@pytest.mark.parametrize(
    ("max_length", "buffer_share", "short"),
    [
        (9900, 0.2, 38),
        (4100, 0.2, 16),
        # By its share alone it would be 45, and begin after 32 tokens: never.
        (11520, 0.28894, 44),
    ],
)
def test_penalties_for_length_begin_at_the_same_share_of_responses(
    max_length: int, buffer_share: float, short: int
) -> None:
    rehearsal = rehearsal_of(
        "sampling.max_response_tokens=8192",
        "model.max_context_length=9000",
        "trainer.tokens_per_row=9000",
        "algorithm.filters=[{kind: overlong_penalty, "
        f"max_length: {max_length}, buffer_share: {buffer_share}}}]",
        facts=dataclasses.replace(FACTS, max_position_embeddings=9000),
    )
    (penalty,) = rehearsal.config.algorithm.filters
    assert penalty.max_length == short


def test_depths_and_windows_hold_as_many_batches() -> None:
    small = rehearsal_of(
        "algorithm.groups_per_step=32",
        "max_off_policy_steps=2",
        "buffer.max_groups=64",
        "buffer.max_in_flight=16",
        "accounting={policy: windowed_fifo, window_groups: 48}",
    ).config
    assert small.algorithm.groups_per_step == 2
    assert (small.buffer.max_groups, small.buffer.max_in_flight) == (4, 1)
    assert small.accounting.window_groups == 3


def test_a_rehearsal_is_no_run_in_anybodys_project() -> None:
    rehearsal = rehearsal_of("logging.wandb={project: numbers}")
    assert rehearsal.config.logging.wandb is None
    assert untried(rehearsal)["logging.wandb"] == "Weights & Biases"
