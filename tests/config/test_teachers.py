"""Teachers: the forms of ``source``, which versions they name, and what terms of the loss ask for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.algorithms import Loss
from forgeasync.config import FORMS, EveryVersions, TeacherSection
from forgeasync.schema import ConfigError
from tests.support.config_samples import minimal_config

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
        "warm",
        "3",
        "{each: 3}",
        "{every: 0}",
        "{every: 2.5}",
        "{ema: 1.0}",
        "{ema: 0.9, every: 2}",
        "[live]",
        "null",
    ],
)
def test_a_config_with_another_form_is_refused_by_its_field(written: str) -> None:
    with pytest.raises(ConfigError) as refused:
        minimal_config(f"teachers={{own: {{source: {written}}}}}")
    (problem,) = refused.value.problems
    assert (problem.field, problem.remedy) == ("teachers.own.source", f"expected {FORMS}")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            "endpoint: {base_url: 'http://t/v1', model: m}, source: live",
            "with an endpoint source must be frozen",
        ),
        ("source: frozen", "must have either model_path or endpoint"),
    ],
)
def test_weights_come_from_one_place(fields: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        minimal_config(f"teachers={{own: {{{fields}}}}}")


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
    loss = Loss.model_validate(
        {"terms": [TOPK, {"kind": "topk_kl", "top_k": 9}, {"kind": "sampled_reverse_kl"}]}
    )
    assert loss.num_teacher_ids == 9 and loss.needs_teacher
    assert Loss.model_validate({"terms": [{"kind": "sampled_reverse_kl"}]}).num_teacher_ids == 0
    assert not Loss.model_validate({"terms": [{"kind": "cross_entropy"}]}).needs_teacher
    assert (
        not loss.needs_student_ids
        and Loss.model_validate({"terms": [TOPK | {"ids": "student"}]}).needs_student_ids
    )
