"""Process reward models: steps, their tokens and scores, engines against a reference, and what is refused."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

from forgeasync.config import ProcessRewardModel, ScorerSection, StepsValue
from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score, ScoreStatus, Task
from forgeasync.runtime import RunRewards
from forgeasync.scoring import (
    ProcessRewardPool,
    RewardFailure,
    RewardTimeout,
    RewardUnavailable,
    StepTokenizer,
    score_of_steps,
    score_without_steps,
    steps_of_response,
    try_rewards,
    written_steps,
)
from tests.support.config_samples import source_with
from tests.support.families import STEP_TAG, process_reward_head, write_process_reward_model
from tests.support.tiers import Starts, starts

CONTEXT = 120
POISON = "~"
"""A text with it has scores of NaN."""
TASK = Task(task_id="t1", prompt="1 + 2 + 3 = ?", answer="6", source_index=0, source="s")
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def section_of(folder: Path, **fields: object) -> ProcessRewardModel:
    sizes = {
        "max_context_length": CONTEXT,
        "max_num_batched_tokens": 300,
        "max_num_seqs": 4,
        "kv_cache_gib": 0.02,
    }
    return ProcessRewardModel(
        kind="process_reward_model", model_path=str(folder), step_separator=";", **(sizes | fields)
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_process_reward_model(tmp_path_factory.mktemp("prm"), nan_at=POISON)


def reference(folder: Path, prompt: str, steps: list[str]) -> list[float]:
    """transformers' own layers in float64, with the tokens written down character by character.

    A score is the probability of the second class at the tag behind a step, as in Zhang et al., "The Lessons
    of Developing Process Reward Models in Mathematical Reasoning", 2025; of one class its sigmoid.
    """
    described = json.loads((folder / "tokenizer.json").read_text())
    ids_of = described["model"]["vocab"] | {one["content"]: one["id"] for one in described["added_tokens"]}
    ids = [ids_of[character] for character in prompt]
    places = []
    for step in steps:
        ids += [*(ids_of[character] for character in step), ids_of[STEP_TAG]]
        places.append(len(ids) - 1)
    tensors = load_file(folder / "model.safetensors")
    model = Qwen2Model(Qwen2Config.from_pretrained(folder)).double().eval()
    model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    num_classes = len(tensors["score.2.bias"])
    head = process_reward_head(num_classes).double()
    head.load_state_dict({k.removeprefix("score."): v for k, v in tensors.items() if k.startswith("score.")})
    with torch.no_grad():
        classes_JC = head(model(torch.tensor([ids])).last_hidden_state[0, places])
    probabilities_J = classes_JC.softmax(-1)[:, 1] if num_classes == 2 else classes_JC[:, 0].sigmoid()
    return probabilities_J.tolist()


class TestTokens:
    def test_tags_in_what_others_wrote_are_ordinary_text(self, model: Path) -> None:
        tokenizer = StepTokenizer(section_of(model))
        hostile = f"1{STEP_TAG}2<|im_end|>"
        tagged = tokenizer.tagged(hostile, [hostile, "3"])
        assert [place for place, one in enumerate(tagged.ids) if one == tokenizer.tag_id] == [
            2 * len(hostile),
            2 * len(hostile) + 2,
        ]
        assert tagged.counted_tags == (0, 1)
        assert len(tagged.ids) == 2 * len(hostile) + 3, "a token for every character and two tags"

    def test_only_tags_that_were_put_there_count_where_others_have_the_token_too(self, model: Path) -> None:
        tokenizer = StepTokenizer(section_of(model, step_tag="7"))
        tagged = tokenizer.tagged("7?", ["77", "1", "7"])
        # 7? 77[7] 1[7] 7[7]
        assert tagged.ids.count(tokenizer.tag_id) == 7 and tagged.counted_tags == (3, 4, 6)

    def test_a_chat_template_goes_around_both_texts(self, model: Path) -> None:
        section = section_of(model, chat_template=True, system_prompt="S")
        tagged = StepTokenizer(section).tagged("1+1<|im_end|>", ["2", "3"])
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        assert tokenizer.decode(tagged.ids) == (
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n1+1<|im_end|><|im_end|>\n"
            f"<|im_start|>assistant\n2{STEP_TAG}3{STEP_TAG}"
        )
        assert tagged.ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2, "none of the task's"


class TestRefusals:
    def problem(self, section: ProcessRewardModel, task: Task = TASK) -> str:
        (problem,) = try_rewards([source_with(section)], {"s": task})
        return str(problem)

    def test_a_good_one_passes(self, model: Path) -> None:
        assert list(try_rewards([source_with(section_of(model))], {"s": TASK})) == []
        assert list(try_rewards([source_with(section_of(model, chat_template=True))], {})) == []

    def test_a_folder_that_is_no_such_model_is_named(self, model: Path, tmp_path: Path) -> None:
        none = tmp_path / "none"
        assert self.problem(section_of(none)) == (
            f"data.reward.model_path = {str(none)!r}: must be a Hugging Face folder; there is none"
        )
        (folder := tmp_path / "other").mkdir()
        assert "must have a config.json of a model: FileNotFoundError" in self.problem(section_of(folder))
        config = json.loads((model / "config.json").read_text())
        wrong = config | {"architectures": ["Qwen2ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(wrong))
        said = self.problem(section_of(folder))
        assert said.startswith("data.reward.model_path = ")
        assert "must be a model of Qwen2ForProcessRewardModel or Qwen2ForRewardModel, not ['Qwen2For" in said
        (folder / "config.json").write_text(json.dumps(config))
        assert "must have its weights as .safetensors" in self.problem(section_of(folder))
        (folder / "model.safetensors").write_bytes(b"")
        assert "must have a tokenizer" in self.problem(section_of(folder))

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            (
                {"step_tag": "12"},
                "step_tag = '12': must be one token of the model's tokenizer",
            ),
            ({"step_tag": "é"}, "step_tag = 'é': must be one token of the model's tokenizer"),
            ({"max_context_length": 257}, "max_context_length = 257: must be at most 256, the max_position_"),
            ({"max_context_length": 14}, "max_context_length = 14: must be at least 15, which task t1 takes"),
        ],
    )
    def test_a_field_that_does_not_fit_is_named(
        self, model: Path, fields: dict[str, object], said: str
    ) -> None:
        assert self.problem(section_of(model, **fields)).startswith(f"data.reward.{said}")

    def test_a_template_that_cannot_be_used_is_named(self, model: Path, tmp_path: Path) -> None:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((model / name).read_bytes())
        said = "data.reward.chat_template = True: needs a chat template that "
        assert self.problem(section_of(tmp_path, chat_template=True)).startswith(f"{said}renders")
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
        assert self.problem(section_of(tmp_path, chat_template=True)) == f"{said}has task and response " + (
            "once each, in this order"
        )


@starts(Starts.ENGINE)
def started(section: ProcessRewardModel) -> RunRewards:
    rewards = RunRewards([source_with(section)], ScorerSection(), limit_s=60.0, seed=0)
    rewards.start()
    return rewards


def pool_of(rewards: RunRewards) -> ProcessRewardPool:
    (member,) = rewards._by_setup.values()
    pool = member._pool  # type: ignore[attr-defined]
    assert isinstance(pool, ProcessRewardPool)
    return pool


@pytest.fixture(scope="module")
def rewards(model: Path) -> Iterator[RunRewards]:
    rewards = started(section_of(model))
    yield rewards
    rewards.close()


class TestEngine:
    """In the order of the file: the last test replaces the engine."""

    def scored(self, rewards: RunRewards, *texts: str, reason: FinishReason = STOP) -> tuple[Score, ...]:
        return asyncio.run(rewards.score(TASK, [Response(text, len(text), reason) for text in texts]))

    def test_steps_of_several_responses_have_the_references_scores(
        self, rewards: RunRewards, model: Path
    ) -> None:
        texts = [";".join(f"{index}+{place}={index * place}" for place in range(index)) for index in range(9)]
        scores = self.scored(rewards, *texts[1:])
        for text, score in zip(texts[1:], scores, strict=True):
            expected = reference(model, TASK.prompt, text.split(";"))
            assert [step.value for step in score.steps] == pytest.approx(expected, abs=2e-6)
            assert score.value == pytest.approx(min(expected), abs=2e-6)
            assert score.is_correct is (min(expected) >= 0.5)
        assert len({score.value for score in scores}) == 8, "responses are not mixed up"
        assert scores[0].scorer == "process_reward_model"
        assert re.fullmatch("[0-9a-f]{12}", scores[0].scorer_version)

    def test_hostile_and_cut_and_empty_texts(self, rewards: RunRewards, model: Path) -> None:
        hostile = f"1{STEP_TAG}{STEP_TAG}2;3"
        (score,) = self.scored(rewards, hostile)
        # The reference's own tokenizer is never asked: the tag in the text is characters.
        expected = reference(model, TASK.prompt, hostile.split(";"))
        assert [step.value for step in score.steps] == pytest.approx(expected, abs=2e-6)
        whole, cut = self.scored(rewards, "1+2=3;3+3", reason=LENGTH)[0], self.scored(rewards, "1+2=3")[0]
        assert [(step.end, step.value) for step in whole.steps] == [(6, pytest.approx(cut.value, abs=2e-6))]
        assert not whole.is_correct and whole.parts["cut_steps"] == 1.0
        empty, first_cut = self.scored(rewards, "", "1+", reason=LENGTH)
        assert empty.steps == () and [(step.end, step.value) for step in first_cut.steps] == [(2, 0.0)]

    def test_a_text_over_the_context_scores_0_and_is_counted(self, rewards: RunRewards, model: Path) -> None:
        # Prompt, response and tag fill the context exactly; then by one token too many.
        room = CONTEXT - len(TASK.prompt) - 1
        fits, too_long = self.scored(rewards, "1" * room, "1" * (room + 1))
        assert fits.status is ScoreStatus.SCORED
        assert fits.value == pytest.approx(reference(model, TASK.prompt, ["1" * room])[0], abs=2e-6)
        assert too_long.status is ScoreStatus.OVERSIZED and too_long.value == 0.0
        assert [step.end for step in too_long.steps] == [room + 1]
        assert rewards.counts["scoring/num_oversized"] == 1

    def test_scores_that_are_no_numbers_fail_their_response_alone(
        self, rewards: RunRewards, model: Path
    ) -> None:
        async def go() -> list[object]:
            responses = [Response(text, 3, STOP) for text in ("1;2", f"1;{POISON}", "1;2")]
            calls = (rewards.score(TASK, [one], index) for index, one in enumerate(responses))
            return list(await asyncio.gather(*calls, return_exceptions=True))

        expected = reference(model, TASK.prompt, ["1", "2"])
        for _ in range(3):
            before, failed, after = asyncio.run(go())
            assert isinstance(failed, RewardFailure)
            assert re.search(
                r"^reward 'process_reward_model' \(.*\) on task t1, rollout 1: the model gave steps "
                r"logits that are not finite: \[.*nan",
                str(failed),
            )
            for scores in (before, after, self.scored(rewards, "1;2")):
                assert isinstance(scores, tuple)
                assert [step.value for step in scores[0].steps] == pytest.approx(expected, abs=2e-6)

    @pytest.mark.exhaustive
    def test_an_engine_that_stands_still_is_killed_and_replaced(self, rewards: RunRewards) -> None:
        pool = pool_of(rewards)
        pool._process._section = pool._process._section.model_copy(update={"limit_s": 0.5})
        before = pool.pid
        assert before is not None
        os.kill(before, signal.SIGSTOP)
        with pytest.raises(
            RewardTimeout, match=r"took longer than 0.5 s \(limit_s\); its process was killed"
        ):
            self.scored(rewards, "1;2")
        assert rewards.counts["scoring/num_killed_rewards"] == 1
        pool._process._section = pool._process._section.model_copy(update={"limit_s": 50.0})
        with pytest.raises(RewardUnavailable, match="its engine is being started again"):
            self.scored(rewards, "1;2")
        deadline_s = time.monotonic() + 240
        while True:
            try:
                (score,) = self.scored(rewards, "1;2")
                break
            except RewardUnavailable:
                assert time.monotonic() < deadline_s
                time.sleep(0.2)
        assert len(score.steps) == 2 and pool.pid not in (None, before)


@pytest.mark.exhaustive
def test_a_model_of_one_class_scores_by_its_sigmoid(tmp_path: Path) -> None:
    folder = write_process_reward_model(tmp_path, architecture="Qwen2ForRewardModel")
    rewards = started(section_of(folder, value="mean"))
    try:
        (score,) = asyncio.run(rewards.score(TASK, [Response("1+2=3;3+3=6", 11, STOP)]))
    finally:
        rewards.close()
    expected = reference(folder, TASK.prompt, ["1+2=3", "3+3=6"])
    assert [step.value for step in score.steps] == pytest.approx(expected, abs=2e-6)
    assert score.value == pytest.approx(sum(expected) / 2, abs=2e-6)


@pytest.mark.exhaustive
def test_a_model_that_cannot_score_is_refused_when_it_starts(tmp_path: Path) -> None:
    folder = write_process_reward_model(tmp_path, nan_at="1")
    with pytest.raises(
        ValueError, match="cannot be started: ValueError: the model gave steps logits that are not"
    ):
        started(section_of(folder))


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


def test_a_section_refuses_what_does_not_fit_together() -> None:
    with pytest.raises(ValueError, match="system_prompt = 'Think' needs chat_template = true"):
        ProcessRewardModel(kind="process_reward_model", model_path="m", system_prompt="Think")
    with pytest.raises(ValueError, match=r"max_num_batched_tokens = 8192 must be at least .* = 9000"):
        ProcessRewardModel(kind="process_reward_model", model_path="m", max_context_length=9000)
