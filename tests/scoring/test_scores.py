"""What a score may say, and what becomes of it on its way to training and to the files of a run."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.observability import RolloutWriter, ScoredGroups, part_means
from forgeasync.rollouts import Group, Score, Step
from forgeasync.scoring import AllFiltered, GroupFiltering, judge_answer
from tests.support.buffer_world import make_task
from tests.support.loops import make_config
from tests.support.rollouts import make_stored_rollout


class TestScore:
    def test_value_and_correctness_may_be_given_by_place(self) -> None:
        assert type(Score(np.float32(0.5), False).value) is float, "as files are written"
        score = Score(np.float32(0.5), True, parts={"format": 1}, penalties={"tools": 0})
        assert (score.value, score.is_correct, score.has_answer) == (0.5, True, True)
        assert score.parts == {"format": 1.0} and type(score.parts["format"]) is float

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"value": math.nan}, "nan"),
            ({"value": math.inf}, "inf"),
            ({"value": "1.0"}, "'1.0'"),
            ({"value": None}, "None"),
            ({"value": True}, "True"),
            # What no float can hold, and what none in 32 bits can.
            ({"value": 10**400}, "finite"),
            ({"value": 1e39}, "a score must be finite, at most 1e"),
            # Correctness is said, and not guessed from the value.
            ({"value": 1.0, "is_correct": 1}, "is_correct"),
            ({"parts": {"format": math.nan}}, "'format' in parts of a score must be finite"),
            ({"parts": {"format": "1"}}, "'format' in parts of a score must be a number, not '1'"),
            ({"parts": {"a b": 1.0}}, "names.*not 'a b'"),
            ({"parts": {"mean": 1.0}}, "none of mean, num_.*, scored_mean, std; not 'mean'"),
            ({"parts": {3: 1.0}}, "names.*not '3'"),
            ({"penalties": {"a": 0.5, "b": -0.1}}, "penalties of a score must be at least 0; 'b'"),
            ({"penalties": {"tools": math.inf}}, "'tools' in penalties of a score must be finite"),
            ({"parts": [1.0]}, r"parts of a score must be numbers by name, not \[1.0\]"),
            ({"parts": {f"p{i}": 0.0 for i in range(65)}}, "at most 64, not 65"),
            ({"has_answer": 1}, "has_answer of a score must be true or false, not 1"),
            ({"feedback": 7}, "feedback of a score must be text, not 7"),
            ({"feedback": "x" * 4001}, "feedback of a score .*at most 4000 characters, not 4001"),
            ({"feedback": "\ud800"}, "feedback of a score .*UTF-8"),
            ({"status": "guessed"}, "guessed"),
            ({"scorer": 7}, "scorer of a score must be text"),
            ({"steps": (0.5,)}, "list of Step"),
            ({"steps": (Step(end=4, value=1.0), Step(end=4, value=0.0))}, r"increasing ends, not \[4, 4\]"),
        ],
    )
    def test_what_cannot_be_logged_or_trained_on_is_refused(
        self, fields: dict[str, object], said: str
    ) -> None:
        with pytest.raises(ValueError, match=said):
            Score(**({"value": 0.0, "is_correct": False} | fields))

    @pytest.mark.parametrize(("end", "value"), [(0, 1.0), (True, 1.0), (1.5, 1.0), (3, math.nan), (3, None)])
    def test_a_step_ends_somewhere_and_has_a_number(self, end: object, value: object) -> None:
        with pytest.raises(ValueError, match="step"):
            Step(end=end, value=value)


def make_group(num: int = 4) -> Group:
    rollouts = tuple(make_stored_rollout((0, 0, 2 + index), text=f"text {index}") for index in range(num))
    return Group(group_id=0, draw_id=0, task=make_task(0), rollouts=rollouts)


class TestTravel:
    def test_penalties_decide_which_correct_responses_are_kept(self) -> None:
        """With hardly any smoothing those without penalty come first, whatever is drawn."""
        section = "{kind: resample_on_correct, num_kept: 2, smoothing: 1.0e-9}"
        config = make_config(f"algorithm.filters=[{section}]")
        penalties = ({"tools": 0.5, "format": 1.0}, {"tools": 0.25}, {}, {"format": 2.0})
        for seed in range(10):
            filtering = GroupFiltering(config.algorithm, seed=seed)
            scores = [Score(1.0, True, penalties=one) for one in penalties]
            assert 2 in filtering.apply(make_group(), scores).kept

    def test_each_agent_is_filtered_by_itself(self) -> None:
        """The judge of every episode is right: it teaches nothing, and the solver trains without it."""
        config = make_config("algorithm.filters=[{kind: dynamic_sampling}]")
        filtering = GroupFiltering(config.algorithm, seed=0)
        rollouts = tuple(
            dataclasses.replace(make_stored_rollout((0, 0, 2)), agent=index % 2) for index in range(4)
        )
        group = dataclasses.replace(make_group(), rollouts=rollouts)
        filtered = filtering.apply(group, [Score(value, False) for value in (0.0, 1.0, 2.0, 1.0)])
        assert filtered.kept == (0, 2) and filtered.rewards == (0.0, 2.0)
        dropped = filtering.apply(group, [Score(value, False) for value in (3.0, 1.0, 3.0, 1.0)])
        assert dropped.kept == () and filtering.metrics()["filtered/num_groups_all_equal"] == 1

    def test_a_group_that_is_kept_ends_the_groups_dropped_in_a_row(self) -> None:
        limit = "algorithm.max_filtered_in_a_row=2"
        config = make_config("algorithm.filters=[{kind: dynamic_sampling}]", limit)
        filtering = GroupFiltering(config.algorithm, seed=0)
        equal, others = ([Score(value, False) for value in some] for some in ([1.0] * 4, [0.0, 1.0] * 2))
        for scores in (equal, others, equal):
            filtering.apply(make_group(), scores)
        with pytest.raises(AllFiltered, match="2 groups in a row"):
            filtering.apply(make_group(), equal)

    def test_a_file_of_rollouts_has_the_parts(self, tmp_path: Path) -> None:
        file = tmp_path / "rollouts.jsonl"
        said = {"parts": {"format": 0.5}, "penalties": {"tools": 1.0}, "feedback": "half of it"}
        score = Score(0.5, False, steps=(Step(end=4, value=0.5),), has_answer=False, **said)
        with RolloutWriter(file, per_step=1) as writer:
            writer.write(1, [dataclasses.replace(make_group(1), rewards=(0.5,), scores=(score,))])
        record = json.loads(file.read_text())
        assert {name: record[name] for name in said} == said
        assert record["score_status"] == "scored" and record["scorer"] == record["scorer_version"] == ""
        assert (record["is_correct"], record["has_answer"], record["steps"]) == (False, False, [[4, 0.5]])


one_score = st.builds(
    Score,
    st.floats(-1e6, 1e6),
    st.booleans(),
    has_answer=st.booleans(),
    parts=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.floats(-1e6, 1e6)),
)


@given(st.lists(st.lists(st.tuples(one_score, st.integers(0, 10**6)), min_size=1, max_size=4), max_size=6))
def test_counts_of_scored_groups_are_those_of_their_definition(groups: list[list[tuple[Score, int]]]) -> None:
    counts = ScoredGroups()
    for group in groups:
        counts.add([score for score, _ in group], [length for _, length in group])
    every = [one for group in groups for one in group]
    expected: dict[str, float] = {}
    if every:
        expected["reward/scored_mean"] = np.mean([score.value for score, _ in every])
        expected["response/no_answer_share"] = np.mean([not score.has_answer for score, _ in every])
        for name, wanted in (("correct", 1), ("wrong", 0)):
            share = np.mean([{score.is_correct for score, _ in group} == {wanted == 1} for group in groups])
            expected[f"group/all_{name}_share"] = share
            lengths = [length for score, length in every if score.is_correct == wanted]
            if lengths:
                expected[f"response/length_mean_{name}"] = np.mean(lengths)
    for name in "abc":
        values = [score.parts[name] for score, _ in every if name in score.parts]
        if values:
            expected[f"score/{name}"] = np.mean(values)
    assert counts.metrics() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    means = part_means([score for score, _ in every])
    for name in "abc":
        values = [score.parts[name] for score, _ in every if name in score.parts]
        assert means.get(name) == (pytest.approx(np.mean(values), abs=1e-9) if values else None)


@pytest.mark.parametrize(
    ("response", "is_correct", "has_answer"),
    [(r"so \boxed{4}", True, True), (r"so \boxed{5}", False, True), ("no idea at all", False, False)],
)
def test_a_wrong_answer_is_told_from_none(response: str, is_correct: bool, has_answer: bool) -> None:
    assert judge_answer(response, "4") == Score(float(is_correct), is_correct, has_answer=has_answer)
