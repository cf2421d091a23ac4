"""What the metrics of a run mean, as the page shows it beside each of them."""

from functools import cache, lru_cache

from forgeasync.observability import TOPICS, Metric, definition_of

HEADLINES = (
    "eval/accuracy",
    "reward/mean",
    "response/length_mean",
    "off_policy/age_mean",
    "mismatch/logprob_abs_mean",
    "grad_norm",
    "time/step_s",
    "time/wait_for_batch_s",
    "throughput/generated_tokens_per_s",
)
"""Metrics whose curves the page shows first."""


@lru_cache(maxsize=4096)
def known_definition(key: str) -> Metric | None:
    """Return the definition of a key of metrics.jsonl; None where this version of forgeasync has none."""
    return definition_of(key)


@cache
def _topic_of(definition: Metric) -> str:
    return next(topic.heading for topic in TOPICS if definition in topic.metrics)


def described(key: str) -> dict[str, object]:
    """Return what a key means, as JSON's types; all null where nobody has defined it."""
    definition = known_definition(key)
    return {
        "key": key,
        "defined_as": None if definition is None else definition.key,
        "meaning": None if definition is None else definition.meaning,
        "when": None if definition is None else definition.when,
        "topic": None if definition is None else _topic_of(definition),
    }


def glossary() -> list[dict[str, object]]:
    """Return all topics with their metrics, as JSON's types."""
    return [
        {
            "heading": topic.heading,
            "note": topic.note,
            "metrics": [
                {"key": metric.key, "meaning": metric.meaning, "when": metric.when}
                for metric in topic.metrics
            ],
        }
        for topic in TOPICS
    ]
