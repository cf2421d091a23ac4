"""Definitions of metrics: what a key means, where it is, and that docs and code agree with them."""

import re
from collections import Counter
from pathlib import Path

import pytest

from forgeasync.observability import (
    METRICS,
    REQUIRED_KEYS,
    TOPICS,
    TRAINER_KEYS,
    Metric,
    Topic,
    as_markdown,
    definition_of,
    markdown,
    undefined,
)
from tests.observability.test_observability import make_step

REPOSITORY = Path(__file__).parents[2]


def test_the_page_is_what_the_definitions_say() -> None:
    written = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == markdown(), "docs/metrics.md is out of date: run `make docs`"


def test_a_page_has_a_table_for_every_topic() -> None:
    topic = Topic(
        heading="Sums",
        note="In units.",
        metrics=(Metric(key="sum/<name>", meaning="a | b", when="Sundays"), Metric(key="n", meaning="c")),
    )
    assert as_markdown(topic).splitlines() == [
        "## Sums",
        "",
        "In units.",
        "",
        "| key | meaning | on lines of |",
        "| --- | --- | --- |",
        r"| `sum/<name>` | a \| b | Sundays |",
        "| `n` | c | every step |",
    ]
    assert [line for line in markdown().splitlines() if line.startswith("## ")] == [
        f"## {topic.heading}" for topic in TOPICS
    ]


def test_every_key_is_defined_once_in_a_sentence_of_its_own() -> None:
    assert {key: number for key, number in Counter(one.key for one in METRICS).items() if number > 1} == {}
    for metric in METRICS:
        first = metric.meaning.split()[0]
        assert metric.meaning.endswith(".") and not first.islower(), metric
        assert first not in ("And", "The", "Of", "Likewise"), f"{metric.key} leans on the row above it"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/format", "reward/<part>"),
        ("eval/reward/format", "eval/reward/<part>"),
        ("eval/hard/reward/format", "eval/<set>/reward/<part>"),
        ("eval/accuracy", "eval/accuracy"),
        ("eval/hard.v2/accuracy", "eval/<set>/accuracy"),
        ("routing/disagreement_share", "routing/disagreement_share"),
        ("routing/disagreement_share_layer_03", "routing/disagreement_share_layer_<i>"),
        ("correction/weight_max", "correction/weight_max"),
        ("correction/masked_share", "correction/<name>"),
        ("reward/", None),
        ("reward/a/b", None),
        ("eval/hard/speed", None),
        ("xloss", None),
        ("buffer/num_of_my_own", None),
    ],
)
def test_keys_find_their_definition(key: str, expected: str | None) -> None:
    found = definition_of(key)
    assert (None if found is None else found.key) == expected
    assert undefined([key]) == ([key] if expected is None else [])


def test_what_is_required_is_what_a_step_has_at_least() -> None:
    assert TRAINER_KEYS == {
        "loss",
        "grad_norm",
        "mismatch/logprob_abs_mean",
        "mismatch/logprob_abs_max",
        "mismatch/kl",
    }
    metrics = make_step(accuracy=0.5).to_dict()
    optional = {key for key in metrics if key.startswith(("eval/", "dropped/"))}
    assert metrics.keys() - optional == REQUIRED_KEYS
    assert undefined(metrics) == []


def test_keys_in_the_code_are_defined() -> None:
    """Keys that only some run writes too; whole runs are checked where they are tested."""
    prefixes = {metric.key.partition("/")[0] for metric in METRICS if "/" in metric.key}
    literal = re.compile(rf'"((?:{"|".join(sorted(prefixes))})/[a-z_]+)"')
    found = {
        key
        for room in ("forgeasync", "apps")
        for file in (REPOSITORY / room).rglob("*.py")
        for key in literal.findall(file.read_text(encoding="utf-8"))
    }
    assert len(found) > 100
    # Counted on the way to a mean, and taken out again.
    assert undefined(found - {"mismatch/num_fresh"}) == []
