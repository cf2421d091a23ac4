"""Sources of problems, their scorers and prompt encoding: splits, reproducibility and error messages."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Must be set before Hugging Face's libraries read it at import: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import huggingface_hub
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from forgeasync.config.schema import DataSection
from forgeasync.config.scorer_schema import ScorerSection
from forgeasync.data.prompts import PromptEncoder
from forgeasync.data.sources import build_source
from forgeasync.data.task import Task
from forgeasync.scoring.gym_answers import last_number
from forgeasync.scoring.scorer import VerifiedScorer, build_scorer
from forgeasync.scoring.verifier_process import ProblemDiffers

# One digit and two terms leave 200 distinct problems.
SMALL_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(*, num_train: int = 20, num_held_out: int = 10, **source: Any) -> DataSection:
    source = {"kind": "reasoning_gym", "task": "chain_sum", "options": SMALL_SUMS, **source}
    return DataSection.model_validate(
        {"source": source, "num_train": num_train, "num_held_out": num_held_out}
    )


def records(path: str | Path, *, num_train: int = 5, num_held_out: int = 3, **source: Any) -> DataSection:
    fields = {"question_field": "prompt.0.content", "answer_field": "reward_model.ground_truth"}
    return DataSection.model_validate(
        {
            "source": {"kind": "huggingface", "path": str(path), **fields, **source},
            "num_train": num_train,
            "num_held_out": num_held_out,
        }
    )


def make_scorer(data: DataSection, *, seed: int) -> VerifiedScorer:
    return build_scorer(data, ScorerSection(num_workers=1), seed=seed)


def value(scorer: VerifiedScorer, task: Task, response: str) -> float:
    """The score's value; it says itself whether it is a full one."""
    score = scorer.score(task, response)
    assert score.is_correct == (score.value == 1.0)
    return score.value


def texts(tasks: list[Task]) -> list[str]:
    return [task.prompt for task in tasks]


@pytest.fixture
def jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # Another test module may have imported the libraries before the variable above was set.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    path = tmp_path / "problems.jsonl"
    write_problems(path, [f"What is {i} + {i}?" for i in range(12)])
    yield path


def write_problems(path: Path, questions: list[str]) -> None:
    with open(path, "w") as lines:
        for i, question in enumerate(questions):
            record = {
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"ground_truth": 2 * i},
                "note": "unused",
            }
            lines.write(json.dumps(record) + "\n")


class TestReasoningGym:
    def test_held_out_problems_are_the_same_for_every_seed_and_train_ones_are_not(self) -> None:
        first, second = build_source(sums(), seed=0), build_source(sums(), seed=1)
        assert first.held_out == second.held_out
        assert texts(first.train) != texts(second.train)
        # Neighbouring seeds must not shift one another's problems by an index.
        assert texts(first.train)[1:] != texts(second.train)[:-1]

    def test_the_same_seed_gives_the_same_problems(self) -> None:
        assert build_source(sums(), seed=3) == build_source(sums(), seed=3)

    def test_sizes_and_unique_ids(self) -> None:
        source = build_source(sums(num_train=30, num_held_out=17), seed=0)
        assert (len(source.train), len(source.held_out)) == (30, 17)
        assert len({task.task_id for task in source.train + source.held_out}) == 47
        assert len({task.source_index for task in source.train + source.held_out}) == 47
        assert len(set(texts(source.held_out))) == 17

    def test_no_held_out_text_is_trained_on_and_skips_are_counted(self) -> None:
        # Half of all problems are held out, so about every other candidate is one of them.
        source = build_source(sums(num_train=100, num_held_out=100), seed=0)
        assert not set(texts(source.train)) & set(texts(source.held_out))
        assert source.num_skipped_held_out > 0
        assert source.train[-1].source_index == 99 + source.num_skipped_held_out

    @pytest.mark.parametrize("field", ["num_train", "num_held_out"])
    def test_more_problems_than_exist(self, field: str) -> None:
        # All of the 200 held out leaves none to train on; 300 distinct ones do not exist.
        data = sums(num_train=5, num_held_out=200) if field == "num_train" else sums(num_held_out=300)
        with pytest.raises(ValueError, match=rf"data\.{field}"):
            build_source(data, seed=0)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ({"task": "chain_sums"}, r"data\.source\.task.*'chain_sums'.*names: chain_sum, (?!.*zebra)"),
            ({"options": {"min_term": 2}}, r"data\.source\.options.*'min_term'.*min_terms"),
            ({"options": {"seed": 2}}, r"data\.source\.options.*'seed' \(2\) is set by the run"),
            ({"options": {"min_terms": 9}}, r"data\.source\.options.*'min_terms': 9"),
            ({"options": {"min_terms": "two"}}, r"data\.source\.options.*'two'"),
            ({"options": {"min_digits": 1.5}}, r"data\.source\.options.*1\.5"),
        ],
    )
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_errors_name_field_value_and_nearest_name(self, source: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            build_source(sums(**source), seed=0)


class TestReasoningGymScorer:
    @pytest.mark.parametrize("group", ["train", "held_out"])
    def test_a_rebuilt_scorer_accepts_the_reference_answers(self, group: str) -> None:
        data = sums(answer_prefix="Answer:")
        source = build_source(data, seed=4)
        scorer = make_scorer(data, seed=4)
        for task in source.train if group == "train" else source.held_out:
            assert value(scorer, task, f"Answer: 1000 no, Answer: {task.answer}\n") == 1.0
            assert value(scorer, task, f"Answer: {task.answer} no, Answer: 1000") < 1.0
            assert value(scorer, task, task.answer) == 0.0

    def test_without_a_prefix_the_whole_response_is_the_answer(self) -> None:
        data = sums()
        task = build_source(data, seed=0).train[0]
        assert value(make_scorer(data, seed=0), task, f" {task.answer}\n") == 1.0

    @pytest.mark.parametrize(
        ("sentence", "number"),
        [
            ("The sum of 8 and 9 is 17.", "17"),
            ("8 - 9 = -1", "-1"),
            ("So x-3", "3"),
            ("(8)-9", "9"),
            ("It is -4.50, I think", "-4.50"),
            ("about 1,234,567!", "1234567"),
            ("1, 2, 3", "3"),
            ("**Answer:** $\\boxed{12}$", "12"),
            ("no idea", None),
            ("", None),
        ],
    )
    def test_last_number_of_a_sentence(self, sentence: str, number: str | None) -> None:
        assert last_number(sentence) == number

    def test_an_answer_in_a_sentence_counts_only_where_its_last_number_is_the_answer(self) -> None:
        data = sums(answer_part="last_number")
        task = build_source(data, seed=0).train[0]
        scorer = make_scorer(data, seed=0)
        assert value(scorer, task, f"Of course! The final answer is {task.answer}.") == 1.0
        assert value(scorer, task, f"{task.answer}, or was it 100000") < 1.0
        assert value(scorer, task, "I cannot say.") == 0.0
        whole = make_scorer(sums(), seed=0)
        assert value(whole, task, f"Of course! The final answer is {task.answer}.") < 1.0

    def test_the_last_number_is_looked_for_after_the_prefix(self) -> None:
        data = sums(answer_prefix="Answer:", answer_part="last_number")
        task = build_source(data, seed=0).train[0]
        scorer = make_scorer(data, seed=0)
        assert value(scorer, task, f"1000 Answer: it is {task.answer}.") == 1.0
        assert value(scorer, task, f"{task.answer} Answer: none") == 0.0

    def test_a_task_of_another_seed_is_refused(self) -> None:
        data = sums()
        task = build_source(data, seed=0).train[0]
        with pytest.raises(ProblemDiffers, match=r"another problem"):
            make_scorer(data, seed=1).score(task, task.answer)


class TestHuggingFace:
    def test_split_is_disjoint_and_held_out_does_not_depend_on_the_seed(self, jsonl: Path) -> None:
        first, second = (build_source(records(jsonl, num_train=9), seed=seed) for seed in (0, 1))
        assert first.held_out == second.held_out
        assert texts(first.train) != texts(second.train)
        assert sorted(texts(first.train + first.held_out)) == sorted(f"What is {i} + {i}?" for i in range(12))
        assert len({task.task_id for task in first.train + first.held_out}) == 12

    def test_repeated_texts_are_held_out_once_and_never_trained_on(self, jsonl: Path) -> None:
        write_problems(jsonl, ["same"] * 8 + [f"other {i}" for i in range(4)])
        source = build_source(records(jsonl, num_train=1, num_held_out=4), seed=0)
        assert len(set(texts(source.held_out))) == 4
        assert "same" in texts(source.held_out)
        assert len(source.train) == 1 and source.train[0].prompt not in texts(source.held_out)

    def test_repeated_texts_are_trained_on_once_and_counted(self, jsonl: Path) -> None:
        write_problems(jsonl, ["same"] * 8 + [f"other {i}" for i in range(4)])
        source = build_source(records(jsonl, num_train=4, num_held_out=1), seed=0)
        assert len(set(texts(source.train))) == 4
        with pytest.raises(ValueError, match=r"data.num_train: 5 .* only 4"):
            build_source(records(jsonl, num_train=5, num_held_out=1), seed=0)

    def test_tasks_hold_question_instruction_and_answer(self, jsonl: Path) -> None:
        data = records(jsonl, instruction="\nBox the answer.")
        for task in build_source(data, seed=0).train:
            i = task.source_index
            assert task.prompt == f"What is {i} + {i}?\nBox the answer."
            assert task.answer == str(2 * i)

    def test_scored_by_math_verify(self, jsonl: Path) -> None:
        task = build_source(records(jsonl), seed=0).train[0]
        scorer = make_scorer(records(jsonl), seed=0)
        assert value(scorer, task, f"\\boxed{{{task.answer}}}") == 1.0
        assert value(scorer, task, f"\\boxed{{{task.answer}1}}") == 0.0

    def test_a_folder_is_read_too(self, jsonl: Path) -> None:
        folder = jsonl.parent / "folder"
        folder.mkdir()
        jsonl.rename(folder / "train.jsonl")
        assert len(build_source(records(folder), seed=0).train) == 5

    def test_a_csv_is_read_too(self, jsonl: Path) -> None:
        table = jsonl.with_suffix(".csv")
        table.write_text("q,a\n" + "".join(f"question {i},{i}\n" for i in range(9)))
        source = build_source(records(table, question_field="q", answer_field="a"), seed=0)
        assert all(task.prompt == f"question {task.answer}" for task in source.train)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"question_field": "promt"}, r"data\.source\.question_field.*'promt'.*did you mean 'prompt'"),
            ({"question_field": "prompt.0.text"}, r"question_field.*'prompt\.0\.text'.*'content', 'role'"),
            ({"question_field": "prompt.1.content"}, r"question_field.*list of 1"),
            ({"question_field": "prompt"}, r"question_field.*no text"),
            ({"answer_field": "reward_model.truth"}, r"data\.source\.answer_field.*'ground_truth'"),
            ({"answer_field": "note.x"}, r"answer_field.*note is a str"),
            ({"split": "validation"}, r"'validation' \(data\.source\.split\)"),
            ({"num_train": 10}, r"data\.num_train \+ data\.num_held_out.*10 \+ 3.*has 12"),
        ],
    )
    def test_errors_name_field_value_and_what_exists(
        self, jsonl: Path, fields: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            build_source(records(jsonl, **fields), seed=0)

    @pytest.mark.parametrize(
        ("name", "cause"),
        [
            ("absent.jsonl", "no file or folder"),
            ("absent/absent", "cannot load"),
            ("broken.jsonl", "cannot load"),
            ("problems.txt", r"is none of \.json"),
        ],
    )
    def test_paths_that_cannot_be_read(
        self, jsonl: Path, monkeypatch: pytest.MonkeyPatch, name: str, cause: str
    ) -> None:
        monkeypatch.chdir(jsonl.parent)
        Path("broken.jsonl").write_text("{")
        Path("problems.txt").write_text("x")
        with pytest.raises(ValueError, match=rf"data\.source\.path.*'{name}'") as caught:
            build_source(records(name), seed=0)
        assert re.search(cause, str(caught.value))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<bos>", "user", "model", "one", "two"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", unk_token="<unk>")


class TestPromptEncoder:
    def test_raw_text_gets_no_special_tokens(self, tokenizer: PreTrainedTokenizerFast) -> None:
        ids = PromptEncoder(tokenizer, chat_template=False).encode("one two one")
        assert ids.dtype == np.int32
        assert ids.tolist() == [4, 5, 4]

    def test_chat_template_ends_where_the_response_begins(self, tokenizer: PreTrainedTokenizerFast) -> None:
        tokenizer.chat_template = (
            "<bos> {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
            "{% if add_generation_prompt %}model{% endif %}"
        )
        ids = PromptEncoder(tokenizer, chat_template=True).encode("one two")
        assert ids.dtype == np.int32
        assert ids.tolist() == [1, 2, 4, 5, 3]

    def test_a_missing_chat_template_is_an_error(self, tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(ValueError, match=r"data\.chat_template"):
            PromptEncoder(tokenizer, chat_template=True)

    def test_prompts_must_leave_room_for_a_response(self, tokenizer: PreTrainedTokenizerFast) -> None:
        encoder = PromptEncoder(tokenizer, chat_template=False)
        task = Task(task_id="sums/7", prompt="one two one", answer="", source_index=7, source="s")
        encoder.check_length(task, max_context_length=10, max_response_tokens=7)
        with pytest.raises(ValueError, match=r"'sums/7' has 3 tokens"):
            encoder.check_length(task, max_context_length=10, max_response_tokens=8)
