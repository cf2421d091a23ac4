"""The steps of a response and the score that they make of it, without a model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.config import ProcessRewardModel, StepsValue
from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score, ScoreStatus
from forgeasync.scoring import score_of_steps, score_without_steps, steps_of_response, written_steps
from forgeasync.trainer import AdvantageSpan, spread

SECTION = ProcessRewardModel(kind="process_reward_model", model_path="m", step_separator=";")


@pytest.mark.parametrize(
    ("text", "is_cut", "steps", "has_cut_step"),
    [
        ("a;bc;d", False, [("a", 2), ("bc", 5), ("d", 6)], False),
        ("a;bc;d", True, [("a", 2), ("bc", 5)], True),
        ("one", False, [("one", 3)], False),
        ("one", True, [], True),
        ("a;b;", False, [("a", 2), ("b", 4)], False),
        # It was cut off behind a separator: what stands before it is whole.
        ("a;b;", True, [("a", 2), ("b", 4)], False),
        ("a;b; ", True, [("a", 2), ("b", 4)], False),
        # Separators without a text between them make no steps.
        (";;a;;; ;b; ;", False, [("a", 8), ("b", 12)], False),
        ("", False, [], False),
        ("", True, [], False),
        (" ;; ;", False, [], False),
    ],
)
def test_a_step_ends_with_its_separator_and_the_last_one_unless_it_was_cut(
    text: str, is_cut: bool, steps: list[tuple[str, int]], has_cut_step: bool
) -> None:
    found = written_steps(text, ";", is_cut=is_cut)
    assert [(step.text, step.end) for step in found.whole] == steps
    assert found.has_cut_step is has_cut_step


@given(st.text(alphabet="ab; \n"), st.sampled_from([";", "\n\n", ";a"]), st.booleans())
def test_every_character_that_is_not_blank_is_in_one_step(text: str, separator: str, is_cut: bool) -> None:
    found = written_steps(text, separator, is_cut=is_cut)
    ends = [step.end for step in found.whole]
    assert ends == sorted(set(ends)) and all(0 < end <= len(text) for end in ends)
    for start, step in zip([0, *ends], found.whole, strict=False):
        assert step.text.strip() and separator not in step.text
        # Nothing of another step is in its span.
        assert [piece for piece in text[start : step.end].split(separator) if piece.strip()] == [step.text]
    behind = text[ends[-1] :] if ends else text
    assert bool(behind.replace(separator, "").strip()) == found.has_cut_step
    assert is_cut or not found.has_cut_step


def scored(text: str, values: list[float], *, how: StepsValue, finish_reason: FinishReason) -> Score:
    section = SECTION.model_copy(update={"value": how})
    response = Response(text, len(text), finish_reason)
    return score_of_steps(response, steps_of_response(response, section), values, section)


@pytest.mark.parametrize(
    ("how", "value"),
    [
        (StepsValue.LAST, 0.75),
        (StepsValue.MINIMUM, 0.25),
        (StepsValue.MEAN, 0.5),
        (StepsValue.PRODUCT, 0.5 * 0.25 * 0.75),
    ],
)
def test_the_value_of_steps(how: StepsValue, value: float) -> None:
    score = scored("a;b;c", [0.5, 0.25, 0.75], how=how, finish_reason=FinishReason.STOP)
    assert score.value == pytest.approx(value) and score.is_correct is (value >= 0.5)
    assert [(step.end, step.value) for step in score.steps] == [(2, 0.5), (4, 0.25), (5, 0.75)]
    assert score.parts == {"num_steps": 3.0, "worst_step": 0.25, "cut_steps": 0.0} and score.has_answer


def test_a_cut_step_counts_for_nothing_and_its_response_is_not_correct() -> None:
    score = scored("a;b;c", [0.9, 0.8], how=StepsValue.LAST, finish_reason=FinishReason.LENGTH)
    assert [(step.end, step.value) for step in score.steps] == [(2, 0.9), (4, 0.8)]
    assert (score.value, score.is_correct, score.has_answer) == (0.8, False, False)
    assert score.parts["cut_steps"] == 1.0


def test_a_response_without_a_whole_step_has_one_of_0_as_its_group_needs() -> None:
    for text, ends in (("only", [4]), (" ;", [2]), ("", [])):
        score = score_without_steps(Response(text, 4, FinishReason.LENGTH))
        assert [(step.end, step.value) for step in score.steps] == [(end, 0.0) for end in ends]
        assert (score.value, score.is_correct, score.has_answer) == (0.0, False, False)
    long = score_without_steps(Response("x", 1, FinishReason.STOP), status=ScoreStatus.OVERSIZED)
    assert long.status is ScoreStatus.OVERSIZED


def test_scores_come_to_the_policys_tokens_of_their_step() -> None:
    # The policy's tokens are "ab" ";" "c;" "d" "e" <end>, one across two steps; the last step was cut.
    score = scored("ab;c;de", [0.5, 0.25], how=StepsValue.LAST, finish_reason=FinishReason.LENGTH)
    spans = [*(AdvantageSpan(end=step.end, value=step.value) for step in score.steps)]
    spans.append(AdvantageSpan(end=None, value=0.0))
    advantages_T = spread(spans, np.array([0, 2, 3, 5, 6, 7]), num_characters=7)
    assert torch.equal(torch.from_numpy(advantages_T), torch.tensor([0.5, 0.5, 0.25, 0.0, 0.0, 0.0]))


def test_a_section_refuses_what_does_not_fit_together() -> None:
    with pytest.raises(ValueError, match="system_prompt = 'Think' needs chat_template = true"):
        ProcessRewardModel(kind="process_reward_model", model_path="m", system_prompt="Think")
    with pytest.raises(ValueError, match=r"max_num_batched_tokens = 8192 must be at least .* = 9000"):
        ProcessRewardModel(kind="process_reward_model", model_path="m", max_context_length=9000)
