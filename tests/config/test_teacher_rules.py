"""Rules on teachers and terms of the loss."""

from pathlib import Path

import pytest
import yaml

from forgeasync.algorithms import Loss
from forgeasync.config import (
    ProcessLauncher,
    ProcessRewardModel,
    RunConfig,
    ShapeSection,
    TeacherSection,
    WarmupSection,
    check_teachers,
)
from forgeasync.testing import tiny_config
from tests.support.lora import LORA

SHOWN = WarmupSection(
    num_steps=1,
    examples_per_step=4,
    shown_per_step=1,
    optimizer={"learning_rate": 1e-3},
    shape=dict.fromkeys(ShapeSection.model_fields, 2),
)
TOPK = {"kind": "topk_kl", "top_k": 5}
STUDENTS = TOPK | {"ids": "student"}
POOL = TeacherSection(model_path="t")


def config_of(
    terms: tuple[dict[str, object], ...], teachers: dict[str, TeacherSection], **more: object
) -> RunConfig:
    config = tiny_config(Path("x"))
    algorithm = type(config.algorithm).model_validate(config.algorithm.model_dump() | {"terms": terms} | more)
    return config.model_copy(update={"algorithm": algorithm, "teachers": teachers})


def cut_sampling(config: RunConfig, *, top_k: int | None, keeps: bool = True) -> RunConfig:
    return config.model_copy(
        update={
            "sampling": config.sampling.model_copy(update={"top_k": top_k}),
            "trainer": config.trainer.model_copy(update={"keep_sampling_mask": keeps}),
        }
    )


def scored_by_steps(config: RunConfig) -> RunConfig:
    reward = ProcessRewardModel(
        kind="process_reward_model", model_path="prm", step_tag="<t>", step_separator=";"
    )
    return config.model_copy(update={"data": config.data.model_copy(update={"reward": reward})})


def moving(written: str) -> TeacherSection:
    return TeacherSection.model_validate({"source": "live"} | yaml.safe_load(written))


def said(config: RunConfig) -> list[str]:
    return [f"{key}: {remedy}" for key, remedy, *_ in check_teachers(config)]


def test_a_teacher_for_every_source_is_no_problem() -> None:
    teacher = TeacherSection(model_path="t")
    assert not said(config_of((), {}))
    assert not said(config_of((TOPK,), {"a": teacher}))
    assert not said(config_of((TOPK,), {"a": TeacherSection(model_path="t", sources=("chain_sum",))}))
    assert not said(config_of(({"kind": "cross_entropy"},), {}))
    assert not said(cut_sampling(config_of((STUDENTS,), {"a": teacher}), top_k=5))
    assert not said(cut_sampling(config_of((TOPK,), {"a": teacher}), top_k=None, keeps=False))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of((TOPK,), {}), "teachers: algorithm.terms has topk_kl, which needs one"),
        (
            config_of(
                (TOPK,), {"a": TeacherSection(model_path="t", prompt="$sibling $prompt")}, group_size=1
            ),
            "algorithm.group_size: must be at least 2: teachers.a.prompt has $sibling",
        ),
        (
            config_of((TOPK,), {"a": TeacherSection(model_path="t", prompt="$answer $prompt")}).model_copy(
                update={"warmup": SHOWN}
            ),
            "warmup.shown_per_step: must be 0, or one prompt of a teacher must have $sibling and no "
            "$feedback; found none",
        ),
        (
            config_of((TOPK,), {"a": TeacherSection(model_path="t", prompt="$feedback $sibling")}).model_copy(
                update={"warmup": SHOWN}
            ),
            "warmup.shown_per_step: must be 0, or one prompt",
        ),
        (
            scored_by_steps(
                config_of((TOPK,), {"a": TeacherSection(model_path="t", prompt="$feedback $prompt")})
            ),
            "teachers.a.prompt: has $feedback, and the reward of 'chain_sum' gives numbers only",
        ),
        (
            config_of((), {"a": TeacherSection(model_path="t")}),
            "teachers: no term of algorithm.terms uses them",
        ),
        (
            config_of((TOPK,), {"a": TeacherSection(model_path="t", sources=("sums",))}),
            "teachers.a.sources: is no source of data; must be of 'chain_sum'",
        ),
        (
            config_of((TOPK,), {name: TeacherSection(model_path="t") for name in "ab"}),
            "teachers: source 'chain_sum' has a and b; must have exactly one",
        ),
        (
            config_of((), {}, objective={"kind": "none"}),
            "algorithm.objective.kind: leaves nothing to train on: algorithm.terms is empty",
        ),
        (
            config_of((TOPK,), {"a": moving("{engine: {dtype: bfloat16}}")}),
            "teachers.a.engine.dtype: must be generator.dtype = 'float32'",
        ),
        (
            config_of((TOPK,), {"a": moving("{model_path: t}")}).model_copy(update={"lora": LORA}),
            "teachers.a.model_path: must be null with lora",
        ),
        (
            config_of((TOPK,), {name: moving(f"{{source: {{ema: 0.{name}}}}}") for name in "12"}),
            "teachers: must be the same for every teacher with ema",
        ),
        (
            config_of((TOPK,), {"a": TeacherSection(model_path="t")}).model_copy(
                update={"launcher": ProcessLauncher.model_construct(kind="process")}
            ),
            "launcher.kind: must be 'local' with teachers",
        ),
        *(
            (
                cut_sampling(config_of(terms, {"a": teacher}), **cuts),
                expected,
            )
            for terms, teacher, cuts, expected in (
                ((STUDENTS,), POOL, {"top_k": None}, "sampling.top_k: must be set for ids: student"),
                (
                    (STUDENTS | {"top_k": 4},),
                    POOL,
                    {"top_k": 5},
                    "algorithm.terms: top_k: must be sampling.top_k = 5",
                ),
                (
                    (STUDENTS, TOPK),
                    POOL,
                    {"top_k": 5},
                    "algorithm.terms: ids: every topk_kl must have the same",
                ),
                (
                    (STUDENTS,),
                    POOL,
                    {"top_k": 5, "keeps": False},
                    "trainer.keep_sampling_mask: must be true for ids: student",
                ),
                (
                    (STUDENTS,),
                    TeacherSection(endpoint={"base_url": "http://t/v1", "model": "t"}),
                    {"top_k": 5},
                    "teachers.a.endpoint: must be null with ids: student",
                ),
            )
        ),
    ],
)
def test_what_does_not_go_together_is_said(config: RunConfig, expected: str) -> None:
    assert any(one.startswith(expected) for one in said(config)), said(config)


def test_the_teacher_is_asked_for_what_the_widest_term_needs() -> None:
    loss = Loss.model_validate(
        {"terms": [TOPK, {"kind": "topk_kl", "top_k": 9}, {"kind": "sampled_reverse_kl"}]}
    )
    assert loss.num_teacher_ids == 9 and loss.needs_teacher
    assert Loss.model_validate({"terms": [{"kind": "sampled_reverse_kl"}]}).num_teacher_ids == 0
    assert not Loss.model_validate({"terms": [{"kind": "cross_entropy"}]}).needs_teacher
    assert not loss.asks_student_ids and Loss.model_validate({"terms": [STUDENTS]}).asks_student_ids
