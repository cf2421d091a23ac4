"""What the warm-up teaches: right worked examples, guesses that are off, and a lossless tokenizer."""

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from forgeasync.config.data import DataSection, ReasoningGymReward, ReasoningGymSource, named_sources
from forgeasync.config.run import ScorerSection
from forgeasync.environments.sources import build_source
from forgeasync.environments.worked_examples import guess, worked_example
from forgeasync.models.tokenizer import UNKNOWN, build_tokenizer, save_tokenizer
from forgeasync.rollouts.task import Task
from forgeasync.scoring.scorer import VerifiedScorer, verifier_choice

DATA = DataSection(
    source=ReasoningGymSource(
        kind="reasoning_gym",
        task="chain_sum",
        options={"min_terms": 2, "max_terms": 9, "min_digits": 1, "max_digits": 2},
        answer_prefix="#",
    ),
    num_train=60,
    num_held_out=8,
)


def make_scorer() -> VerifiedScorer:
    (source,) = named_sources(DATA)
    return VerifiedScorer(verifier_choice(ReasoningGymReward(), source, seed=0), ScorerSection(num_workers=1))


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return build_source(DATA, seed=0).train


def test_worked_examples_are_right_step_by_step(tasks: list[Task]) -> None:
    scorer = make_scorer()
    for task in tasks:
        response = worked_example(task)
        assert scorer.score(task, response).is_correct
        steps = response.partition("#")[0].split(";")
        assert len(steps) == len(re.findall(r" [+-] ", task.prompt))
        for step in steps:
            left, operator, right, result = re.fullmatch(r"(-?\d+)([+-])(\d+)=(-?\d+)", step).groups()
            exact = int(left) + int(right) if operator == "+" else int(left) - int(right)
            assert exact == int(result)


def test_guesses_are_off_by_the_error(tasks: list[Task]) -> None:
    scorer = make_scorer()
    assert scorer.score(tasks[0], guess(tasks[0], error=0)).is_correct
    assert guess(tasks[0], error=2) == f"#{int(tasks[0].answer) + 2}"


def test_another_kind_of_problem_is_refused() -> None:
    task = Task(task_id="x", prompt="What is love?", answer="1", source_index=0, source="s")
    with pytest.raises(ValueError, match="no chain_sum problem"):
        worked_example(task)


def test_the_tokenizer_gives_back_every_text(tasks: list[Task], tmp_path: Path) -> None:
    texts = [text for task in tasks for text in (task.prompt, worked_example(task))]
    save_tokenizer(build_tokenizer(texts), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("é")["input_ids"]) == [UNKNOWN]


def test_the_fixed_sentence_is_one_token_and_digits_stay_apart(tasks: list[Task]) -> None:
    tokenizer = build_tokenizer([task.prompt for task in tasks])
    tokens = tokenizer.tokenize("State the final answer to the following arithmetic problem: 47 + 8 =")
    assert tokens[0] == "State the final answer to the following arithmetic problem"
    assert tokens[2:] == ["4", "7", " + ", "8", " ="]
