"""Loading a run's config: every message names field, value and remedy. Rules of teachers' sections."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from forgeasync.algorithms import Loss
from forgeasync.config import (
    FORMS,
    EveryVersions,
    RunConfig,
    TeacherSection,
    check_without_model,
    dump_config,
    load_config,
)
from forgeasync.schema import ConfigError, Problem
from tests.support.config_samples import CONFIGS, MINIMAL, minimal_config, only


def refused(config_file: Path, *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, overrides)
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return list(caught.value.problems)


SHIPPED = [[file] for file in sorted(CONFIGS.glob("*.yaml"))]
RECIPES = [[CONFIGS / "tiny_moe_cpu.yaml", file] for file in sorted((CONFIGS / "algorithms").glob("*.yaml"))]


@pytest.mark.parametrize("files", [*SHIPPED, *RECIPES], ids=lambda files: files[-1].stem)
def test_shipped_configs_and_recipes_load_and_read_back(files: list[Path], tmp_path: Path) -> None:
    config = load_config(files, [])
    assert check_without_model(config) == []
    assert config.algorithm.group_size == load_config(files[0]).algorithm.group_size
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml", []) == config


@pytest.mark.parametrize("written", ["off", "'off'", "response", "all"])
def test_routing_replay_is_read_as_written(config_file: Path, tmp_path: Path, written: str) -> None:
    """YAML takes a bare off for a boolean."""
    config = load_config(config_file, [f"trainer.routing_replay={written}"])
    assert config.trainer.routing_replay == written.strip("'")
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml", []) == config


def test_overrides_replace_values_and_are_yaml(config_file: Path) -> None:
    config = load_config(
        config_file,
        [
            "trainer.optimizer.learning_rate=3e-4",
            "trainer.optimizer.betas=[0.8, 0.9]",
            "generator.dtype=bfloat16",
            "run_dir=runs/a=b",
            "data.source.options={min_terms: 2, ratio: 0.5, flag: true, text: a}",
            "data.source.options.max_terms=8",
            "seed=5",
            "seed=6",
            "trainer.tokens_per_row=${model.max_context_length}",
        ],
    )
    assert config.trainer.optimizer.learning_rate == 3e-4
    assert config.trainer.optimizer.betas == (0.8, 0.9)
    assert config.generator.dtype.value == "bfloat16"
    assert config.run_dir == "runs/a=b"
    assert config.seed == 6
    assert config.trainer.tokens_per_row == 64
    options = config.data.source.model_dump()["options"]
    assert options == {"min_terms": 2, "ratio": 0.5, "flag": True, "text": "a", "max_terms": 8}
    assert [type(value) for value in options.values()] == [int, float, bool, str, int]


TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",))),
    st.text(alphabet="${}\\a.:- '\"#\n1e5~"),
    st.sampled_from(["1e-4", "yes", "null", "~", "0x10", "2020-01-01", "${a}", "\\${a}", "\\\\${", "x${"]),
)


@given(
    name=TEXTS,
    instruction=TEXTS,
    learning_rate=st.floats(min_value=1e-12, max_value=1.0),
    options=st.dictionaries(TEXTS, st.one_of(st.integers(), st.booleans(), TEXTS), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_dumped_config_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    instruction: str,
    learning_rate: float,
    options: dict[str, int | bool | str],
) -> None:
    values = OmegaConf.to_container(OmegaConf.create(MINIMAL))
    assert isinstance(values, dict)
    values["name"] = name
    values["trainer"]["optimizer"]["learning_rate"] = learning_rate
    values["data"]["source"]["options"] = options
    values["data"]["source"]["answer_prefix"] = instruction
    config = RunConfig.model_validate(values)
    file = tmp_path_factory.mktemp("dump") / "run.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file, []) == config


BAD_PARTS = [
    ("objective={kind: ppo}", ["objective.kind = 'ppo'", "expected one of 'ppo_clip', 'cispo'"]),
    ("objective={clip_low: 0.1}", ["objective.kind: required key is missing: one of 'ppo_clip'"]),
    ("objective={kind: ppo_clip, clip_low: 1.0}", ["objective.clip_low = 1.0", "must be less than 1"]),
    ("objective=gspo", ["objective = 'gspo'", "expected a section; write {kind: gspo}"]),
    ("objective=ppo", ["objective = 'ppo'", "the keys kind (one of 'ppo_clip', 'cispo'"]),
    ("corrections=[{kind: tis}]", ["corrections.0.kind = 'tis'", "expected one of 'truncated_is'"]),
    ("corrections=[{kind: icepop, hi: 2}]", ["corrections.0.hi = 2", "algorithm.corrections.0.high?"]),
    ("corrections=[{kind: truncated_is, cap: 0}]", ["corrections.0.cap = 0", "at least 1e-30"]),
    ("corrections=[{kind: age_weight}]", ["corrections.0.half_life: required", "(In policy versions.)"]),
    ("corrections={kind: icepop}", ["corrections = {'kind': 'icepop'}", "expected a list"]),
    ("kl={estimator: k4, coefficient: 1}", ["kl.estimator = 'k4'", "'k1', 'k2', 'k3', 'unbiased_k3'"]),
    ("kl=0.1", ["kl = 0.1", "expected a section with the keys estimator, coefficient, where"]),
    ("advantage=gropo", ["advantage = 'gropo'", "expected one of 'grpo', 'dr_grpo'"]),
    ("advantage=group_pass_at_k", ["algorithm.advantage.pass_at_k: required key is missing"]),
    ("kl={estimator: k3, coefficient: 0}", ["kl.coefficient = 0", "at least 1e-30"]),
    ("advantage={kind: group_pass_at_k, pass_at_k: 0}", ["pass_at_k = 0", "greater than 0"]),
    ("advantage=3", ["advantage = 3", "a section with the keys kind (one of 'grpo'"]),
]
"""In the algorithm section, whose parts can be written in several forms."""


@pytest.mark.parametrize(
    ("override", "words"),
    [
        *((f"algorithm.{override}", words) for override, words in BAD_PARTS),
        ("max_steps='3'", ["max_steps = '3'", "expected a whole number, got text"]),
        ("max_steps=3.5", ["max_steps = 3.5", "expected a whole number, got a number with a fraction"]),
        ("max_steps=1e3", ["max_steps = 1000.0", "expected a whole number; write 1000"]),
        ("max_steps=true", ["max_steps = True", "expected a whole number"]),
        ("max_steps=null", ["max_steps", "expected a whole number, got nothing"]),
        ("max_steps=0", ["max_steps = 0", "must be greater than 0"]),
        ("max_off_policy_steps=33", ["max_off_policy_steps = 33", "must be at most 32"]),
        ("max_off_policy_steps=-1", ["max_off_policy_steps = -1", "must be at least 0"]),
        ("name=3", ["name = 3", "expected text, got a whole number"]),
        ("data.chat_template='yes'", ["data.chat_template = 'yes'", "expected true or false, got text"]),
        ("sampling.top_p=high", ["sampling.top_p = 'high'", "expected a number, got text"]),
        ("generator.dtype=int4", ["generator.dtype = 'int4'", "'float32' or 'bfloat16'"]),
        ("algorithm=grpo", ["algorithm = 'grpo'", "expected a section with the keys objective, corrections"]),
        ("trainer.optimizer.betas=[0.9]", ["trainer.optimizer.betas = [0.9]", "entry 2", "missing"]),
        ("trainer.optimizer.betas=[1,1,1]", ["trainer.optimizer.betas = [1, 1, 1]", "must have 2 entries"]),
        ("trainer.optimizer.betas=0.9", ["trainer.optimizer.betas = 0.9", "expected a list"]),
        ("trainer.optimizer.betas=[a,0.9]", ["trainer.optimizer.betas.0 = 'a'", "expected a number"]),
        ("data.source.kind=csv", ["data.source.kind = 'csv'", "'reasoning_gym', 'huggingface'"]),
        ("data.source.tsk=a", ["data.source.tsk = 'a'", "did you mean data.source.task?"]),
        ("data.source.options.x=[1]", ["data.source.options.x = [1]", "a whole number or a number or"]),
        ("max_step=8", ["max_step = 8", "unknown key", "did you mean max_steps?"]),
        ("group_size=8", ["group_size = 8: unknown key; did you mean algorithm.group_size?"]),
        ("trainer.max_steps=8", ["trainer.max_steps = 8", "did you mean max_steps?"]),
        ("trainer.lr=8", ["trainer.lr = 8: unknown key. Known keys here: parallel,"]),
        ("max_attempts=8", ["did you mean buffer.max_attempts or scorer.max_attempts or episodes.max_"]),
        ("no_equals_sign", ["override = 'no_equals_sign'", "must read key.path=value"]),
        ("a..b=3", ["override = 'a..b=3'", "must read key.path=value"]),
        ("max_steps=[1", ["max_steps = '[1'", "not a valid YAML value", "quote it"]),
        ("3=x", ["override = '3=x'", "must read key.path=value"]),
        ("trainer.optimizer.learning_rate=.inf", ["learning_rate = inf", "must be a finite number"]),
        ("data.source.options={1: [2]}", ["data.source.options.1 = [2]", "expected a whole number or"]),
        ("name=${nowhere}", ["name", "'nowhere' not found", "refers to another key"]),
        ("name=???", ["name = '???'", "give it a value"]),
    ],
)
def test_bad_value_is_explained(config_file: Path, override: str, words: list[str]) -> None:
    message = only(refused(config_file, override))
    for word in words:
        assert word in message


def test_override_into_a_list_is_explained(config_file: Path) -> None:
    overrides = ["trainer.optimizer.betas=[0.9,0.9]", "trainer.optimizer.betas.0=3"]
    message = only(refused(config_file, *overrides))
    assert "override = 'trainer.optimizer.betas.0=3'" in message
    assert "give the whole list" in message


def test_missing_keys_are_named_with_their_meaning(config_file: Path) -> None:
    config_file.write_text("name: x\ndata: {source: {task: a}}\n")
    messages = "\n".join(map(str, refused(config_file)))
    assert "max_steps: required key is missing (Number of training steps; " in messages
    assert "data.num_train: required key is missing" in messages
    assert "data.source.kind: required key is missing: one of 'reasoning_gym', 'huggingface'" in messages
    assert "model: required key is missing" in messages


def test_all_problems_are_listed_at_once(config_file: Path) -> None:
    overrides = ["nonsense", "max_steps=0", "algorithm.groupsize=8", "data.source.task=3", "name=${nowhere}"]
    fields = [problem.field for problem in refused(config_file, *overrides)]
    assert sorted(fields) == ["algorithm.groupsize", "data.source.task", "max_steps", "name", "override"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: [1", ["not valid YAML", "line 2"]),
        ("name: a\nname: b", ["not valid YAML", "duplicate key name"]),
        ("- a\n- b", ["must hold a mapping of keys"]),
        ("name: ${", ["name", "refers to another key"]),
    ],
)
def test_bad_file_is_explained(config_file: Path, text: str, words: list[str]) -> None:
    config_file.write_text(text)
    message = only(refused(config_file))
    for word in words:
        assert word in message


def test_later_files_go_over_earlier_ones(config_file: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("name: first\nseed: 3\nalgorithm: {objective: {kind: ppo_clip, clip_low: 0.1}}\n")
    second.write_text("name: second\nalgorithm: {objective: {kind: ppo_clip, clip_high: 0.4}}\n")
    config = load_config([config_file, first, second], ["max_steps=7"])
    assert (config.name, config.seed, config.max_steps) == ("second", 3, 7)
    objective = {"kind": "ppo_clip", "clip_low": 0.1, "clip_high": 0.4, "dual_clip": None}
    assert config.algorithm.objective.model_dump() == objective
    assert config.algorithm.group_size == 4


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.objective={kind: gspo, clip_high: 0.5}"],
        ["algorithm.objective.kind=gspo", "algorithm.objective.clip_high=0.5"],
        ["algorithm.objective.clip_high=0.5", "algorithm.objective.kind=gspo"],
    ],
)
def test_another_kind_replaces_the_section(config_file: Path, tmp_path: Path, overrides: list[str]) -> None:
    """ppo_clip's clip_low means something else to gspo."""
    other = tmp_path / "other.yaml"
    other.write_text("algorithm: {objective: {kind: ppo_clip, clip_low: 0.1, dual_clip: 3}}\n")
    config = load_config([config_file, other], overrides)
    expected = {"kind": "gspo", "clip_low": 3e-4, "clip_high": 0.5}
    assert config.algorithm.objective.model_dump() == expected


def test_missing_and_unreadable_files_are_explained(config_file: Path, tmp_path: Path) -> None:
    missing_ones = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    with pytest.raises(ConfigError) as caught:
        load_config([missing_ones[0], config_file, missing_ones[1]])
    assert [problem.value for problem in caught.value.problems] == [str(one) for one in missing_ones]
    missing = tmp_path / "nope.yaml"
    problems = refused(missing, "nonsense")
    assert str(problems[0]) == f"config = {str(missing)!r}: no such file; give the path of a YAML file"
    assert problems[1].field == "override"
    assert "cannot be read (IsADirectoryError)" in only(refused(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read (UnicodeDecodeError)" in only(refused(tmp_path / "binary.yaml"))


def test_long_values_are_cut(config_file: Path) -> None:
    assert len(only(refused(config_file, f"max_steps={'x' * 10_000}"))) < 300


# --- teachers ---

TOPK = {"kind": "topk_kl", "top_k": 5}


@pytest.mark.parametrize("written", ["frozen", "live", {"every": 7}, {"ema": 0.99}])
def test_a_source_comes_back_as_it_was_written(written: object) -> None:
    model = {"model_path": "x"} if written == "frozen" else {}
    section = minimal_config(f"teachers={json.dumps({'own': model | {'source': written}})}").teachers["own"]
    assert section.moves is (written != "frozen") and section.num_engines == 1
    assert section.model_path == model.get("model_path") and section.endpoint is None
    assert TeacherSection.model_validate(section.model_dump()) == section
    assert section.model_dump(mode="json")["source"] == written


@pytest.mark.parametrize(
    "written",
    [
        *("warm", "3", "null", "[live]"),
        *("{each: 3}", "{every: 0}", "{every: 2.5}", "{ema: 1.0}", "{ema: 0.9, every: 2}"),
    ],
)
def test_a_config_with_another_form_is_refused_by_its_field(written: str) -> None:
    with pytest.raises(ConfigError) as refused:
        minimal_config(f"teachers={{own: {{source: {written}}}}}")
    (problem,) = refused.value.problems
    assert (problem.field, problem.remedy) == ("teachers.own.source", f"expected {FORMS}")


def test_weights_come_from_one_place() -> None:
    with pytest.raises(ConfigError, match="with an endpoint source must be frozen"):
        minimal_config("teachers={own: {endpoint: {base_url: 'http://t/v1', model: m}, source: live}}")
    with pytest.raises(ConfigError, match="must have either model_path or endpoint"):
        minimal_config("teachers={own: {source: frozen}}")


@given(every=st.integers(1, 7), gaps=st.lists(st.integers(1, 9), max_size=40))
def test_what_is_taken_follows_every_multiple_at_once(every: int, gaps: list[int]) -> None:
    """Published versions can have gaps, where the exchange has skipped some."""
    source, newest, version = EveryVersions(every=every), 0, 0
    for gap in gaps:
        before, version = version, version + gap
        is_due = any(one % every == 0 for one in range(before + 1, version + 1))
        assert source.is_due(version, newest=newest) == is_due
        if is_due:
            newest = version
        assert not source.is_due(version, newest=newest)


def test_the_teacher_is_asked_for_what_the_widest_term_needs() -> None:
    def loss(*terms: dict[str, object]) -> Loss:
        return Loss.model_validate({"terms": terms})

    sampled = {"kind": "sampled_reverse_kl"}
    widest = loss(TOPK, TOPK | {"top_k": 9}, sampled)
    assert widest.num_teacher_ids == 9 and widest.needs_teacher and not widest.needs_student_ids
    assert loss(sampled).num_teacher_ids == 0
    assert not loss({"kind": "cross_entropy"}).needs_teacher
    assert loss(TOPK | {"ids": "student"}).needs_student_ids
