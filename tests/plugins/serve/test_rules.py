"""What a run that serves people must be, and what other runs must not."""

from collections.abc import Sequence

import pytest

from forgeasync.config import check_without_model, dump_config, load_config
from forgeasync.schema import ConfigError
from tests.support.config_samples import CONFIGS, minimal_config

SERVED = (
    "data={source: {kind: served}, num_train: 1, num_held_out: 0}",
    "environment={kind: served}",
    "episodes.num_workers=1",
    "algorithm={advantage: reinforce_pp, group_size: 1, groups_per_step: 2}",
    "buffer.stale_groups=drop",
    "evaluation={num_problems: 0}",
)
SOURCE = "{kind: reasoning_gym, task: chain_sum}"
SET = "evaluation.sets=[{name: s, source: %s, num_problems: 2}]"
OTHER_DATA = f"data={{source: {SOURCE}, num_train: 9, num_held_out: 9}}"
JUDGED = "serving.score_from=[feedback, judge]"


def problems(*overrides: str) -> dict[str, str]:
    return {problem.field: str(problem) for problem in check_without_model(minimal_config(*overrides))}


def test_the_config_that_comes_with_the_package() -> None:
    config = load_config(CONFIGS / "serve_cpu.yaml")
    assert not check_without_model(config)
    assert "token:" not in dump_config(config)


def test_a_served_run() -> None:
    assert not problems(*SERVED)
    own = "environment={kind: python, factory: tests.plugins.serve.test_sessions_of_people.Counting}"
    assert not problems(*SERVED, own, "serving.score_from=[environment, feedback]")
    assert not problems(*SERVED, JUDGED, "agents={policy: {}, judge: {trainable: false}}")
    assert not problems(*SERVED, "serving.host=0.0.0.0", "serving.token_env=T", "serving.public_host=h")


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (["environment=null"], "environment.kind", "must be 'served'"),
        (["environment={kind: coding}"], "environment.kind", "must be 'served'"),
        ([OTHER_DATA], "data.source.kind", "must be 'served'"),
        (["data.num_held_out=3"], "data.num_held_out", "must be 0"),
        (["evaluation.num_problems=3"], "evaluation.num_problems", "must be at most data.num_held_out = 0"),
        ([SET % SOURCE], "evaluation.sets", "must be left out"),
        ([SET % "{kind: served}"], "evaluation.sets.0.source.kind", "only source"),
        (["algorithm.group_size=4"], "algorithm.group_size", "must be 1"),
        (["algorithm.advantage=grpo"], "algorithm.advantage", "'reinforce_pp'"),
        (["algorithm.advantage=rloo"], "algorithm.advantage", "'reinforce_pp'"),
        (["episodes.num_workers=2"], "episodes.num_workers", "must be 1"),
        (["buffer.stale_groups=wait"], "buffer.stale_groups", "must be 'drop'"),
        (["buffer.age_of=oldest_token"], "buffer.age_of", "must be 'token'"),
        (["serving.host=10.0.0.1"], "serving.token_env", "can be reached from other machines"),
        (["serving.host=0.0.0.0", "serving.token_env=T"], "serving.public_host", "stands for all"),
        (["serving.idle_session_s=100", "serving.session_s=50"], "serving.idle_session_s", "at most"),
        (["serving.score_from=[environment]"], "serving.score_from", "needs an environment of your own"),
        ([JUDGED], "agents", "must be {policy: {}, judge: {trainable: false}}"),
        ([JUDGED, "agents={policy: {}, judge: {}}"], "agents", "must be {policy"),
        ([JUDGED, "agents={solver: {}, judge: {trainable: false}}"], "agents", "must be {policy"),
        (["agents={policy: {}, judge: {trainable: false}}"], "agents", "must be left out"),
        (["episodes.endings.no_score=zero"], "episodes.endings.no_score", "must be one of run_again, mask"),
    ],
)
def test_what_is_refused(overrides: Sequence[str], field: str, words: str) -> None:
    found = problems(*SERVED, *overrides)
    assert words in found[field], found
    assert "must be at least 2" not in str(found)


def test_other_runs_have_held_out_problems() -> None:
    found = problems("evaluation.num_problems=0")
    assert list(found) == ["evaluation.num_problems"] and "at least 1" in found["evaluation.num_problems"]
    sources = f"[{{source: {SOURCE}}}, {{source: {{kind: served}}}}]"
    several = f"data={{source: null, sources: {sources}, num_train: 9, num_held_out: 9}}"
    found = problems(several, "evaluation.num_problems=9")
    assert "only source" in found["data.sources.1.source.kind"]


@pytest.mark.parametrize("sources", ["[]", "[feedback, feedback]", "[likes]"])
def test_where_scores_come_from(sources: str) -> None:
    with pytest.raises(ConfigError, match=r"serving\.score_from"):
        problems(*SERVED, f"serving.score_from={sources}")
