"""Process reward models: their tokens, their engine against an independent reference, and what is refused."""

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
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

from forgeasync.config import ProcessRewardModel, ScorerSection
from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score, ScoreStatus, Task
from forgeasync.runtime import RunRewards
from forgeasync.scoring import (
    ProcessRewardPool,
    RewardFailure,
    RewardTimeout,
    RewardUnavailable,
    StepTokenizer,
    try_rewards,
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
        "max_num_batched_tokens": 256,
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

    def test_only_tags_that_were_put_there_count_where_the_tag_is_an_ordinary_token(
        self, model: Path
    ) -> None:
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
                "step_tag = '12': must be one token of the model's tokenizer, where it is 2",
            ),
            ({"step_tag": "é"}, "step_tag = 'é': must be one token of the model's tokenizer, where it is no"),
            (
                {"max_context_length": 512, "max_num_batched_tokens": 512},
                "max_context_length = 512: must be at most 256, the max_position_embeddings",
            ),
            (
                {"max_context_length": 14},
                "max_context_length = 14: must be at least 15, which task t1 takes with the shortest step",
            ),
        ],
    )
    def test_a_field_that_does_not_fit_the_model_is_named(
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

    def test_steps_have_the_references_scores_also_of_several_responses_at_once(
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
        assert rewards.counts.num_oversized == 1

    def test_scores_that_are_no_numbers_fail_the_attempt_and_touch_no_other(
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
    def test_an_engine_that_stands_still_is_killed_and_responses_wait_for_the_next_one(
        self, rewards: RunRewards
    ) -> None:
        pool = pool_of(rewards)
        pool._process._section = pool._process._section.model_copy(update={"limit_s": 0.5})
        before = pool.pid
        assert before is not None
        os.kill(before, signal.SIGSTOP)
        with pytest.raises(
            RewardTimeout, match=r"took longer than 0.5 s \(limit_s\); its process was killed"
        ):
            self.scored(rewards, "1;2")
        assert rewards.counts.num_killed_rewards == 1
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
