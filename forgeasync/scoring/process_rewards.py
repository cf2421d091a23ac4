"""Process reward models: steps of a response, input of the model, its engine, and the score.

The engine runs in a separate process, ``process_reward_worker``. Policy and reward model have different
tokens, so the text is tokenized with the model's tokenizer. Scores are assigned to characters of the text,
and from there to the policy's tokens (``forgeasync.trainer``).

Response and task are untrusted: neither may contain a step tag or another special token. Both are tokenized
without any added token, so that ``<extra_0>`` in a text is a few ordinary tokens. Only the tags that were
inserted after the steps count.
"""

import json
import logging
import math
import secrets
import statistics
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from forgeasync.config import ProcessRewardModel, StepsValue, name_of
from forgeasync.environments import Response
from forgeasync.rollouts import FinishReason, Score, ScoreStatus, Step, Task
from forgeasync.schema import Problem
from forgeasync.scoring.endpoints import RewardUnavailable
from forgeasync.scoring.reward_pool import ProcessKilled, RewardFailure, RewardProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenStep:
    """One step of a response."""

    text: str
    """Text of the step, without the separator."""
    end: int
    """Number of characters of the response up to the end of the step, including the separators after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSteps:
    """Steps of a response."""

    whole: tuple[WrittenStep, ...]
    """Steps that have ended, each with a text that is not blank."""
    has_cut_step: bool
    """Whether they are followed by a step that was cut off."""


def written_steps(text: str, separator: str, *, is_cut: bool) -> WrittenSteps:
    """Divide a response into its steps.

    A step ends where a separator begins; the last one ends with the response, unless the response was cut off
    inside it. Consecutive separators, and white space between them, are not steps: they belong to the step
    before, or at the beginning to the first step.
    """
    pieces = text.split(separator)
    whole: list[WrittenStep] = []
    end = 0
    for index, piece in enumerate(pieces):
        is_last = index == len(pieces) - 1
        end += len(piece) + (0 if is_last else len(separator))
        if not piece.strip():
            if whole and not (is_last and is_cut):
                whole[-1] = WrittenStep(text=whole[-1].text, end=end)
        elif is_last and is_cut:
            return WrittenSteps(whole=tuple(whole), has_cut_step=True)
        else:
            whole.append(WrittenStep(text=piece, end=end))
    return WrittenSteps(whole=tuple(whole), has_cut_step=False)


def steps_of_response(response: Response, section: ProcessRewardModel) -> WrittenSteps:
    """Return the steps of a response."""
    is_cut = response.finish_reason is FinishReason.LENGTH
    return written_steps(response.text, section.step_separator, is_cut=is_cut)


def combined(values: Sequence[float], how: StepsValue) -> float:
    """Return one value for the values of at least one step."""
    match how:
        case StepsValue.LAST:
            return values[-1]
        case StepsValue.MINIMUM:
            return min(values)
        case StepsValue.MEAN:
            return statistics.fmean(values)
        case StepsValue.PRODUCT:
            return math.prod(values)


def score_of_steps(
    response: Response, steps: WrittenSteps, values: Sequence[float], section: ProcessRewardModel
) -> Score:
    """Return the score of a response, given one value for each of its whole steps, at least one.

    A cut step has no reward, and a response that was cut off is not correct.
    """
    value = combined(values, section.value)
    was_cut = response.finish_reason is FinishReason.LENGTH
    return Score(
        value,
        not was_cut and value >= section.correct_from,
        parts={
            "num_steps": float(len(values)),
            "worst_step": min(values),
            "cut_steps": float(steps.has_cut_step),
        },
        steps=tuple(Step(end=step.end, value=one) for step, one in zip(steps.whole, values, strict=True)),
        has_answer=not was_cut,
    )


def score_without_steps(response: Response, *, status: ScoreStatus = ScoreStatus.SCORED) -> Score:
    """Return the score 0 of a response that has no steps to score, or is too long.

    A group trains on rewards of steps only if every response with a text has them, so the whole text is one
    step.
    """
    steps = (Step(end=len(response.text), value=0.0),) if response.text else ()
    return Score(0.0, False, steps=steps, has_answer=False, status=status)


class TagRefused(ValueError):
    """``step_tag`` is not a single token."""


class TemplateRefused(ValueError):
    """``chat_template`` cannot be used with this tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedTokens:
    """Input tokens of the model."""

    ids: tuple[int, ...]
    counted_tags: tuple[int, ...]
    """Indices, among the tokens with the tag's id, of those that end a step."""


class StepTokenizer:
    """Tokenizer of a process reward model, used as its section says."""

    def __init__(self, section: ProcessRewardModel) -> None:
        """Load the tokenizer.

        Raises:
            TagRefused, TemplateRefused: The section does not fit the tokenizer.
            OSError, ValueError: The folder has no readable tokenizer.
        """
        # transformers takes a second to import.
        from transformers import PreTrainedTokenizerFast

        # Exactly as in tokenizer.json: AutoTokenizer would rebuild a Qwen2 tokenizer and drop what differs.
        whole = PreTrainedTokenizerFast.from_pretrained(section.model_path)
        self._plain = _without_added_tokens(whole.backend_tokenizer)
        tag = whole.encode(section.step_tag, add_special_tokens=False)
        if len(tag) != 1 or tag[0] == whole.unk_token_id:
            found = "no token" if whole.unk_token_id in tag else f"{len(tag)} tokens"
            raise TagRefused(f"must be one token of the model's tokenizer, where it is {found}")
        (self.tag_id,) = tag
        """Id of the step tag."""
        self._before: list[int] = []
        self._between: list[int] = []
        if section.chat_template:
            before, between = _template_parts(whole, section.system_prompt)
            self._before = whole.encode(before, add_special_tokens=False)
            self._between = whole.encode(between, add_special_tokens=False)

    def tagged(self, prompt: str, steps: Sequence[str]) -> TaggedTokens:
        """Return the tokens of a task and the steps of a response, with a tag after each step.

        The part of the chat template after the response is left out, because scores do not depend on later
        tokens.
        """
        ids = [*self._before, *self._encode(prompt), *self._between]
        counted = []
        num_tags = ids.count(self.tag_id)
        for step in steps:
            of_step = self._encode(step)
            num_tags += of_step.count(self.tag_id)
            counted.append(num_tags)
            num_tags += 1
            ids += [*of_step, self.tag_id]
        return TaggedTokens(ids=tuple(ids), counted_tags=tuple(counted))

    def _encode(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return the same tokenizer, with markers such as ``<|im_end|>`` treated as ordinary text."""
    described = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(
        json.dumps(described | {"added_tokens": [], "post_processor": None, "truncation": None})
    )


def _template_parts(tokenizer: "PreTrainedTokenizerFast", system_prompt: str | None) -> tuple[str, str]:
    """Return the parts of the chat template before the task, and between task and response."""
    task, response = (f"content{secrets.token_hex(16)}" for _ in range(2))
    messages = [{"role": "user", "content": task}, {"role": "assistant", "content": response}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # any type: a template is a program
        raise TemplateRefused(f"needs a chat template that renders: {error}") from error
    assert isinstance(rendered, str), "of one conversation, not tokenized"
    before, has_task, rest = rendered.partition(task)
    between, has_response, after = rest.partition(response)
    if not has_task or not has_response or task in after or response in before + after:
        raise TemplateRefused("needs a chat template that has task and response once each, in this order")
    return before, between


ARCHITECTURES = ("Qwen2ForProcessRewardModel", "Qwen2ForRewardModel")
"""Architectures for which vLLM's task ``token_classify`` returns a score for every token."""


def problem_of_model(section: ProcessRewardModel, task: Task | None, field: str) -> Problem | None:
    """Return the problem of the model at ``field`` of the config, or None.

    ``task`` is one that the model will score.
    """
    folder = Path(section.model_path)

    def of_folder(remedy: str) -> Problem:
        return Problem(field=f"{field}.model_path", value=section.model_path, remedy=remedy)

    if not folder.is_dir():
        return of_folder("must be a Hugging Face folder; there is none")
    try:
        config = json.loads((folder / "config.json").read_bytes())
        architectures, positions = config["architectures"], config["max_position_embeddings"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return of_folder(f"must have a config.json of a model: {type(error).__name__}: {error}")
    if not isinstance(architectures, list) or not set(architectures) & set(ARCHITECTURES):
        return of_folder(f"must be a model of {' or '.join(ARCHITECTURES)}, not {architectures!r}"[:300])
    if not any(folder.glob("*.safetensors")):
        return of_folder("must have its weights as .safetensors; there are none")
    context = section.max_context_length
    if isinstance(positions, int) and context > positions:
        remedy = f"must be at most {positions}, the max_position_embeddings of {section.model_path}"
        return Problem(field=f"{field}.max_context_length", value=context, remedy=remedy)
    return _problem_of_tokenizer(section, task, field)


def _problem_of_tokenizer(section: ProcessRewardModel, task: Task | None, field: str) -> Problem | None:
    try:
        tokenizer = StepTokenizer(section)
    except TagRefused as error:
        return Problem(field=f"{field}.step_tag", value=section.step_tag, remedy=str(error))
    except TemplateRefused as error:
        return Problem(field=f"{field}.chat_template", value=section.chat_template, remedy=str(error))
    except (OSError, ValueError) as error:
        remedy = f"must have a tokenizer (tokenizer.json): {error}"
        return Problem(field=f"{field}.model_path", value=section.model_path, remedy=remedy[:500])
    prompt, what = ("1", "a task") if task is None else (task.prompt, f"task {task.task_id}")
    num_tokens = len(tokenizer.tagged(prompt, ["1"]).ids)
    if num_tokens <= section.max_context_length:
        return None
    return Problem(
        field=f"{field}.max_context_length",
        value=section.max_context_length,
        remedy=f"must be at least {num_tokens}, which {what} takes with the shortest step",
    )


logger = logging.getLogger(__name__)

RETRY_AFTER_S = 2.0
"""Seconds after which a retry makes sense while an engine is being started."""


class ProcessRewardPool:
    """Runs one engine; thread-safe. Responses are scored concurrently, each in a separate call.

    If the engine dies, its calls fail, which counts as an attempt. Responses that arrive while the next
    engine loads are scored later, which does not.
    """

    def __init__(self, section: ProcessRewardModel) -> None:
        """Store the settings; ``start`` starts the process."""
        self._section = section
        self._name = name_of(section)
        self._process = RewardProcess(section)
        self._lock = threading.Lock()
        self._starting: threading.Thread | None = None
        self._start_failure: str | None = None
        self._num_oversized = 0

    @property
    def num_places(self) -> int:
        """Maximum number of concurrent calls."""
        return self._section.max_num_seqs

    @property
    def counts(self) -> Counter[str]:
        """Counts since the pool was created."""
        killed, oversized = self._process.num_killed, self._num_oversized
        return Counter({"scoring/num_killed_rewards": killed, "scoring/num_oversized": oversized})

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None without one."""
        return self._process.pid

    @property
    def version(self) -> str:
        """Digest of everything that affects the scores; "" before ``start``."""
        return self._process.version

    def start(self) -> str:
        """Load the model; return a description. Raises the same errors as ``RewardProcess.start``."""
        self._process.start()
        return f"a process with {self._section.model_path} scores steps as reward {self._name!r}"

    def score(self, task: Task, responses: Sequence[Response], rollouts: str) -> tuple[Score, ...]:
        """Score one response to a task; ``rollouts`` names it in errors ("rollout 3").

        Raises:
            RewardUnavailable: The engine is being restarted.
            RewardFailure: There is no score; the message names the reward, the task and the rollout.
        """
        where = f"reward {self._name!r} ({self._section.model_path}) on task {task.task_id}, {rollouts}"
        self._check_running(where)
        try:
            scores = self._process.call(task, responses)
        except ProcessKilled:
            raise RewardUnavailable(
                f"{where}: its engine was killed over another call", RETRY_AFTER_S
            ) from None
        except RewardFailure as error:
            raise type(error)(f"{where}: {error}") from None
        with self._lock:
            self._num_oversized += sum(score.status is ScoreStatus.OVERSIZED for score in scores)
        return scores

    def close(self) -> None:
        """Stop the process."""
        self._process.stop()

    def _check_running(self, where: str) -> None:
        with self._lock:
            failure, self._start_failure = self._start_failure, None
            if failure is not None:
                raise RewardFailure(f"{where}: {failure}")
            if self._process.is_running:
                return
            if self._starting is None:
                logger.warning("the engine of reward %r is gone; another one is started", self._name)
                self._starting = threading.Thread(target=self._start_again, name="step engine", daemon=True)
                self._starting.start()
        raise RewardUnavailable(f"{where}: its engine is being started again", RETRY_AFTER_S)

    def _start_again(self) -> None:
        failure = None
        try:
            self._process.start()
        except (ValueError, RewardFailure) as error:
            failure = f"the engine cannot be started again: {error}"
        with self._lock:
            self._start_failure, self._starting = failure, None
