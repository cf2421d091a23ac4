"""Lines of metrics.jsonl against the definitions."""

from collections.abc import Mapping

from forgeasync.observability import METRICS, undefined

ALWAYS = frozenset(metric.key for metric in METRICS if metric.when == "every step" and "<" not in metric.key)


def check_keys(line: Mapping[str, object]) -> None:
    """Every key has a definition, and nothing is missing that every step has."""
    assert undefined(line) == [], "keys without a definition in forgeasync/observability"
    always = ALWAYS
    if line["step"] == 0:
        always = {key for key in ALWAYS if key.startswith("metrics/")}
        always |= {"step", "policy_version", "time/eval_s", "time/elapsed_s", "eval/num_unscored"}
    assert always - line.keys() == set(), "keys that every line has by their definitions"
