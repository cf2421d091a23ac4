"""Sources of problems, their scorers and prompt encoding: splits, reproducibility and error messages."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Must be set before Hugging Face's libraries read it at import: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import huggingface_hub
import numpy as np
import pytest
from tokenizers import processors

from forgeasync.config import DataSection, PythonReward, ScorerSection, load_config, named_sources
from forgeasync.controller import check_plan
from forgeasync.environments import build_source, digest_of, preview_data
from forgeasync.rollouts import PromptEncoder, Task
from forgeasync.schema import ConfigError
from forgeasync.scoring import ProblemDiffers, VerifierPool, verifier_choice
from tests.support.buffer_world import make_task
from tests.support.chat import CHATML, END, PICKY, START, make_tokenizer
from tests.support.config_samples import CONFIGS

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


def make_scorer(data: DataSection, *, seed: int) -> VerifierPool:
    (source,) = named_sources(data)
    (reward,) = source.rewards
    assert not isinstance(reward, PythonReward)
    return VerifierPool(verifier_choice(reward, source, seed=seed), ScorerSection(num_workers=1))


def value(scorer: VerifierPool, task: Task, response: str) -> float:
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
    def test_problems_follow_from_the_seed_except_those_held_out(self) -> None:
        first, second = (build_source(sums(num_train=30, num_held_out=17), seed=seed) for seed in (0, 1))
        assert first == build_source(sums(num_train=30, num_held_out=17), seed=0)
        assert first.held_out == second.held_out
        assert texts(first.train) != texts(second.train)
        # Neighboring seeds must not shift one another's problems by an index.
        assert texts(first.train)[1:] != texts(second.train)[:-1]
        tasks = [*first.train, *first.held_out]
        assert (len(first.train), len(first.held_out)) == (30, 17)
        assert len({task.task_id for task in tasks}) == len({task.source_index for task in tasks}) == 47
        assert len(set(texts(first.held_out))) == 17

    def test_no_held_out_text_is_trained_on(self) -> None:
        # Half of all problems are held out, so about every other candidate is one of them.
        source = build_source(sums(num_train=100, num_held_out=100), seed=0)
        assert not set(texts(source.train)) & set(texts(source.held_out))
        assert len(source.train) == 100 and source.train[-1].source_index > 99

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            # All of the 200 held out leaves none to train on; 300 distinct ones do not exist.
            ({"num_train": 5, "num_held_out": 200}, r"data\.num_train"),
            ({"num_held_out": 300}, r"data\.num_held_out"),
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
    @pytest.mark.parametrize(
        ("response", "values"),
        [
            # Of a whole response as the answer, with a prefix, with the last number, and with both.
            (" {}\n", (1.0, 0.0, 1.0, 0.0)),
            ("Answer: 1000 no, Answer: {}\n", (None, 1.0, 1.0, 1.0)),
            ("Answer: {} no, Answer: 1000", (None, None, None, None)),
            ("Of course! The final answer is {}.", (None, 0.0, 1.0, 0.0)),
            ("{}, or was it 100000", (None, 0.0, None, 0.0)),
            ("I cannot say.", (None, 0.0, 0.0, 0.0)),
            ("1000 Answer: it is {}.", (None, None, 1.0, 1.0)),
            ("{} Answer: none", (None, None, 1.0, 0.0)),
        ],
    )
    def test_what_counts_as_the_answer(self, response: str, values: tuple[float | None, ...]) -> None:
        """By a rebuilt scorer; None stands for less than a full score."""
        prefix, part = {"answer_prefix": "Answer:"}, {"answer_part": "last_number"}
        for fields, expected in zip(({}, prefix, part, prefix | part), values, strict=True):
            data = sums(**fields)
            source, scorer = build_source(data, seed=4), make_scorer(data, seed=4)
            for task in (*source.train, *source.held_out):
                found = value(scorer, task, response.format(task.answer))
                assert found < 1.0 if expected is None else found == expected

    def test_a_task_of_another_seed_is_refused(self) -> None:
        data = sums()
        task = build_source(data, seed=0).train[0]
        with pytest.raises(ProblemDiffers, match=r"another problem"):
            make_scorer(data, seed=1).score(task, task.answer)


LISTED = json.dumps([{"q": f"question {i}", "a": i} for i in range(9)], indent=1)
NO_RECORDS = r"data\.source\.path.*(has no records|No columns)"


class TestHuggingFace:
    def test_split_is_disjoint_and_held_out_does_not_depend_on_the_seed(self, jsonl: Path) -> None:
        first, second = (build_source(records(jsonl, num_train=9), seed=seed) for seed in (0, 1))
        assert first.held_out == second.held_out
        assert texts(first.train) != texts(second.train)
        assert sorted(texts([*first.train, *first.held_out])) == sorted(
            f"What is {i} + {i}?" for i in range(12)
        )
        assert len({task.task_id for task in [*first.train, *first.held_out]}) == 12

    def test_repeated_texts_are_held_out_or_trained_on_once(self, jsonl: Path) -> None:
        write_problems(jsonl, ["same"] * 8 + [f"other {i}" for i in range(4)])
        source = build_source(records(jsonl, num_train=1, num_held_out=4), seed=0)
        assert len(set(texts(source.held_out))) == 4 and "same" in texts(source.held_out)
        assert len(source.train) == 1 and source.train[0].prompt not in texts(source.held_out)
        source = build_source(records(jsonl, num_train=4, num_held_out=1), seed=0)
        assert len(set(texts(source.train))) == 4
        with pytest.raises(ValueError, match=r"data.num_train = 5: .* gave only 4"):
            build_source(records(jsonl, num_train=5, num_held_out=1), seed=0)

    def test_tasks_hold_question_instruction_and_answer_and_are_scored(self, jsonl: Path) -> None:
        data = records(jsonl, instruction="\nBox the answer.")
        scorer = make_scorer(data, seed=0)
        for task in build_source(data, seed=0).train:
            i = task.source_index
            assert (task.prompt, task.answer) == (f"What is {i} + {i}?\nBox the answer.", str(2 * i))
            assert value(scorer, task, f"\\boxed{{{task.answer}}}") == 1.0
            assert value(scorer, task, f"\\boxed{{{task.answer}1}}") == 0.0

    def test_a_folder_a_csv_a_list_and_a_part_of_a_file_are_read_too(self, jsonl: Path) -> None:
        tasks = build_source(records(jsonl, split="train[2:10]"), seed=0)
        asked = sorted(texts([*tasks.train, *tasks.held_out]))
        assert asked == sorted(f"What is {i} + {i}?" for i in range(2, 10))
        table = jsonl.with_suffix(".csv")
        table.write_text("q,a\n" + "".join(f"question {i},{i}\n" for i in range(9)))
        listed = jsonl.with_suffix(".json")
        listed.write_text(LISTED)
        for file in (table, listed):
            source = build_source(records(file, question_field="q", answer_field="a"), seed=0)
            assert len(source.train) == 5
            assert all(task.prompt == f"question {task.answer}" for task in source.train)
        folder = jsonl.parent / "folder"
        folder.mkdir()
        jsonl.rename(folder / "train.jsonl")
        assert len(build_source(records(folder), seed=0).train) == 5

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"question_field": "promt"}, r"data\.source\.question_field.*'promt'.*did you mean 'prompt'"),
            ({"question_field": "prompt.0.text"}, r"question_field.*'prompt\.0\.text'.*'content', 'role'"),
            ({"question_field": "prompt.1.content"}, r"question_field.*list of 1"),
            ({"question_field": "prompt"}, r"question_field.*must be text or a number"),
            ({"answer_field": "reward_model.truth"}, r"data\.source\.answer_field.*'ground_truth'"),
            ({"answer_field": "note.x"}, r"answer_field.*note is a str"),
            ({"split": "validation"}, r"data\.source\.split = 'validation'.*'train' as its only split"),
            ({"num_train": 10}, r"data\.num_train \+ data\.num_held_out.*10 \+ 3.*has 12"),
        ],
    )
    def test_errors_name_field_value_and_what_exists(
        self, jsonl: Path, fields: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            build_source(records(jsonl, **fields), seed=0)

    def write_lines(self, path: Path, *lines: object, num: int = 12) -> DataSection:
        """Good records, of which the first ones are replaced; as text where a line is text."""
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        rest = [json.dumps({"q": f"question {i}", "a": i}) for i in range(num - len(texts))]
        path.write_text("\n".join([*texts, *rest]) + "\n")
        return records(path, question_field="q", answer_field="a")

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ({"q": "x"}, r"data\.source\.answer_field = 'a': does not exist in line 1 of"),
            ({"a": 1}, r"data\.source\.question_field = 'q': does not exist in line 1 of"),
            ({"q": "x", "a": ""}, r"answer_field = 'a': is empty \(''\) in line 1"),
            ({"q": "x", "a": None}, r"answer_field = 'a': is empty \(None\) in line 1"),
            ({"q": "x\ud800", "a": 1}, r"question_field = 'q': contains '\\ud800', .* in line 1"),
            ({"q": " \n", "a": 1}, r"question_field = 'q': is empty \(' \\n'\) in line 1"),
            ({"q": "x", "a": [1]}, r"answer_field = 'a': is a list in line 1.*\[1\]; must be text"),
            ({"q": "x", "a": True}, r"answer_field = 'a': is a bool"),
            ({"q": "x", "a": float("nan")}, r"answer_field = 'a': is nan in line 1.*finite"),
            ({"q": "x", "a": float("inf")}, r"answer_field = 'a': is inf in line 1.*finite"),
            ('{"q": "x", "a"', r"source\.path.*line 1, column \d+ is not valid JSON.*near"),
            ("", r"answer_field.*line 3"),
            ("[1, 2]x", r"source\.path.*line 1, column 7 is not valid JSON"),
            ("17", r"source\.path.*line 1 holds int 17; must be an object"),
            ("[" * 100_000, r"source\.path.*(nested too deeply|not valid JSON)"),
        ],
    )
    def test_a_bad_record_is_named_by_line_field_and_value(
        self, jsonl: Path, line: object, message: str
    ) -> None:
        lines = [line] if line else ["", json.dumps({"q": "x", "a": 1}), json.dumps({"q": "y"})]
        with pytest.raises(ConfigError, match=message):
            build_source(self.write_lines(jsonl, *lines), seed=0)

    def test_a_bad_record_is_found_wherever_it_stands(self, jsonl: Path) -> None:
        """Also where this seed would not draw it."""
        good = [{"q": f"first {i}", "a": i} for i in range(299)]
        for bad in ({"q": "x"}, '{"q": '):
            data = self.write_lines(jsonl, *good, bad, num=301)
            with pytest.raises(ConfigError, match="line 300"):
                build_source(data, seed=0)

    def test_records_may_have_other_keys_that_differ(self, jsonl: Path) -> None:
        data = self.write_lines(
            jsonl, {"q": "x", "a": "1/2", "note": {"b": 1}}, {"q": "y", "a": 2, "note": 3}
        )
        assert len(build_source(data, seed=0).train) == 5

    @pytest.mark.parametrize(
        ("value", "text"),
        [(7, "7"), (2**70, str(2**70)), (0.5, "0.5"), (1e20, "1" + "0" * 20), (1e-5, "0.00001"), ("x", "x")],
    )
    def test_numbers_become_decimals(self, jsonl: Path, value: object, text: str) -> None:
        data = self.write_lines(jsonl, {"q": "this", "a": value}, num=8)
        source = build_source(data, seed=0)
        assert [task.answer for task in [*source.train, *source.held_out] if task.prompt == "this"] == [text]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("absent.jsonl", None, r"(?s)data\.source\.path.*'absent.jsonl'.*no file or folder"),
            ("absent/absent", None, r"(?s)data\.source\.path.*'absent/absent'.*cannot load"),
            ("broken.jsonl", "{", r"(?s)data\.source\.path.*'broken.jsonl'.*cannot load"),
            ("problems.txt", "x", r"(?s)data\.source\.path.*'problems.txt'.*is none of \.json"),
            ("empty.jsonl", "", NO_RECORDS),
            ("empty.json", "[]", NO_RECORDS),
            ("empty.csv", "", NO_RECORDS),
            ("b.json", LISTED.replace('"a": 3', '"a" 3'), r"line 16, column 7 is not valid JSON"),
            ("m.json", LISTED.replace(',\n  "a": 4', ""), r"'a': does not exist in record 4 of"),
            ("b.csv", "q,a\nx,1\ny,1,2,3\n", r"Expected 2 fields in line 3, saw 4"),
            ("m.csv", "q,a\n" + "x,1\n" * 3 + "y,\n" * 9, r"answer_field = 'a': is empty.*record 3 of"),
            ("b.parquet", "PAR1 not really", r"data\.source\.path.*[Pp]arquet"),
            ("b.jsonl", b"\xff\xfe\x00", r"line 1 is not UTF-8 text"),
        ],
    )
    def test_files_that_cannot_be_read(
        self,
        jsonl: Path,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        content: str | bytes | None,
        message: str,
    ) -> None:
        monkeypatch.chdir(jsonl.parent)
        if content is not None:
            Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=message):
            build_source(records(name, question_field="q", answer_field="a"), seed=0)

    def test_folders_without_data_or_with_broken_files(self, jsonl: Path) -> None:
        folder = jsonl.parent / "folder"
        folder.mkdir()
        with pytest.raises(ConfigError, match=r"source\.path.*doesn't contain any data files"):
            build_source(records(folder), seed=0)
        (folder / "train.jsonl").write_text('{"prompt": 1}\n{"prompt":\n')
        with pytest.raises(ConfigError, match=r"source\.path.*train\.jsonl: line 2, column"):
            build_source(records(folder), seed=0)


class TestLook:
    """What --dry-run does about data."""

    def test_generated_problems_are_tried(self) -> None:
        assert preview_data(sums(), seed=0).words == "chain_sum; all 20 and 10 were generated now"
        with pytest.raises(ConfigError, match=r"data\.num_held_out = 300"):
            preview_data(sums(num_held_out=300), seed=0)
        options = {"min_terms": 2, "max_terms": 9}
        many = sums(num_train=10_000_000, options=options)
        assert preview_data(many, seed=0).words == "chain_sum; the first 20,000 and 10 were generated now"

    def test_local_files_are_read_and_the_hub_is_left_alone(self, jsonl: Path) -> None:
        assert preview_data(records(jsonl), seed=0).words == f"{jsonl}; read now, and drawn"
        assert "not looked at" in preview_data(records("nobody/no-such-set"), seed=0).words
        with pytest.raises(ConfigError, match=r"answer_field"):
            preview_data(records(jsonl, answer_field="gone"), seed=0)

    def test_a_plan_is_refused_for_its_data_too(self, jsonl: Path) -> None:
        source = f"{{kind: huggingface, path: {jsonl}, question_field: prompt.0.content, answer_field: gone}}"
        changes = [f"data.source={source}", "data.num_train=5", "data.num_held_out=5", "model.path=nowhere"]
        config = load_config(CONFIGS / "tiny_moe_cpu.yaml", [*changes, "evaluation.num_problems=5"])
        with pytest.raises(ConfigError) as caught:
            check_plan(config)
        fields = [problem.field for problem in caught.value.problems]
        assert fields == ["model.path", "data.source.answer_field"]


def test_other_problems_under_the_same_names_have_another_digest() -> None:
    task = Task(task_id="train/0", prompt="1 + 1", answer="2", source_index=0, source="a")
    same = digest_of([task, task])
    assert same == digest_of([task, replace(task, record={"x": 1})]) and same.startswith("2 problems, ")
    others = [replace(task, **{key: "other"}) for key in ("task_id", "prompt", "answer", "source")]
    moved = replace(task, prompt="1 + 12", answer="")
    digests = {digest_of([task, one]) for one in (*others, moved)} | {digest_of([others[0], task])}
    assert len(digests | {same, digest_of([task])}) == 8


GYM = "import forgeasync.environments.reasoning_gym\n"
FOR_PLOTS = """
import reasoning_gym, sys
print([name for name in sys.modules if name.startswith(("matplotlib", "mpl_toolkits"))])
board = reasoning_gym.create_dataset("game_of_life", seed=0, size=1)[0]
print(board["metadata"]["source_dataset"], "matplotlib" in sys.modules)
"""
PLOTS = """
import matplotlib.pyplot as plt
plt.switch_backend("agg")
print(type(plt.figure().add_subplot(projection="3d")).__name__)
"""
BEFORE = f"""
import matplotlib.pyplot as plt
{GYM}
import cellpylib.ca_functions2d as cells
print(cells.plt is plt)
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (GYM + FOR_PLOTS, "[]\ngame_of_life False\n"),
        (GYM + PLOTS, "Axes3D\n"),
        (BEFORE, "True\n"),
    ],
    ids=["nothing for plots is imported", "plots are drawn", "what was imported before is left alone"],
)
def test_reasoning_gym_is_imported_without_what_it_imports_for_plots(code: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == printed


# ---- prompts


THINKING = "{% if thinking %}think {% endif %}" + CHATML
USER_ONLY = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
BRIEF = {"system_prompt": "be brief"}
ASKED = f"{START}user\none two{END}\n{START}assistant\n"


def encoder(template: str | None, **options: object) -> PromptEncoder:
    """By a tokenizer that puts a special token before whatever it tokenizes."""
    tokenizer = make_tokenizer(template)
    first = [(START, tokenizer.convert_tokens_to_ids(START))]
    added = processors.TemplateProcessing(single=f"{START} $A", special_tokens=first)
    tokenizer.backend_tokenizer.post_processor = added
    return PromptEncoder(tokenizer, **options)


@pytest.mark.parametrize(
    ("template", "options", "text"),
    [
        # Raw text gets no special tokens.
        (None, {}, "one two"),
        (THINKING, {}, ASKED),
        (THINKING, {"template_arguments": {"thinking": True}}, f"think {ASKED}"),
        (THINKING, BRIEF, f"{START}system\nbe brief{END}\n{ASKED}"),
    ],
)
def test_a_prompt_ends_where_the_response_begins(
    template: str | None, options: dict[str, object], text: str
) -> None:
    ids = encoder(template, chat_template=template is not None, **options).encode("one two")
    assert ids.dtype == np.int32 and make_tokenizer(None).decode(ids.tolist()) == text


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        (None, {}, r"data\.chat_template"),
        (THINKING, {"template_arguments": {"thinkin": True}}, r"arguments\.thinkin = True: .*thinking"),
        (PICKY, BRIEF, r"data\.system_prompt = 'be brief': .*no system role"),
        (USER_ONLY, BRIEF, r"data\.system_prompt = 'be brief': .*leaves"),
    ],
)
def test_a_template_that_cannot_render_what_the_config_asks_for_is_refused(
    template: str | None, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        encoder(template, chat_template=True, **options)


def test_prompts_must_leave_room_for_a_response() -> None:
    raw, task = encoder(None, chat_template=False), replace(make_task(7), prompt="one")
    raw.check_length(task, max_context_length=10, max_response_tokens=7)
    with pytest.raises(ValueError, match=rf"'{task.task_id}' has 3 tokens"):
        raw.check_length(task, max_context_length=10, max_response_tokens=8)
