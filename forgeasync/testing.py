"""Tools for testing your own environments, rewards and loops: scripted models, clocks and tiny runs.

docs/testing.md has an example of each. The package's own tests use them too.
"""

import asyncio
import json
import selectors
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from forgeasync.config import (
    AlgorithmSection,
    DataSection,
    EpisodesSection,
    EvaluationSection,
    GeneratorSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PayloadSection,
    ReasoningGymSource,
    RunConfig,
    SamplingSection,
    TrainerSection,
)
from forgeasync.environments import (
    AgentRole,
    BrokenToolCall,
    Environment,
    Episodes,
    Message,
    ToolCall,
    ToolSpec,
    Turn,
    TurnRequest,
    checked_messages,
    choose_renderer,
)
from forgeasync.models import build_tokenizer, character_tokenizer, save_tokenizer
from forgeasync.rollouts import EpisodeId, EpisodeOutcome, FinishReason, SampledTurn, Task, ToolStatus
from forgeasync.schema import Section
from forgeasync.training import Overrides, TrainResult, train

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
"""Result of a coroutine."""


class ScriptEnded(LookupError):
    """A turn was requested after the last turn of the script."""


def scripted_turn(text: str = "", *calls: ToolCall, broken: Sequence[BrokenToolCall] = ()) -> Turn:
    """Return a turn of one token, for a ``ScriptedAgent``.

    Args:
        text: Text of the turn.
        calls: Tool calls of the turn.
        broken: Tool calls that cannot be parsed.
    """
    return Turn(
        text=text,
        num_prompt_tokens=1,
        num_tokens=1,
        finish_reason=FinishReason.STOP,
        tool_calls=calls,
        broken_tool_calls=tuple(broken),
    )


class ScriptedAgent:
    """An ``Agent`` whose turns you write. It records everything that your environment sends to it.

        agent = ScriptedAgent("5", "4")
        score = asyncio.run(TryAgain().rollout(task, agent))
        assert score.value == 0.5 and len(agent.heard) == 2

    Nothing is tokenized and there are no deadlines; ``run_episode`` has both.
    """

    def __init__(self, *turns: Turn | str, tool_limit_s: float = 300.0) -> None:
        """Create an agent.

        Args:
            turns: Turns of the agent, in order; a string is a turn with this text.
            tool_limit_s: Time limit of a tool call in seconds, in place of ``episodes.tool_s``.
        """
        self._turns = [scripted_turn(turn) if isinstance(turn, str) else turn for turn in turns]
        self._num_turns = len(turns)
        self.tool_limit_s = tool_limit_s
        self.tool_calls: Counter[ToolStatus] = Counter()
        self.tool_calls_s: list[float] = []
        self.kept: dict[str, bytes | str] = {}
        """Files that the environment saved with ``keep``, by name."""
        self.heard: list[tuple[Message, ...]] = []
        """Messages of each call of ``respond``."""
        self.tools: list[tuple[ToolSpec, ...]] = []
        """Tools of each call of ``respond``."""
        self.stops: list[tuple[str, ...]] = []
        """Stop texts of each call of ``respond``."""

    @property
    def base_url(self) -> str:
        """Not available. Test agents with their own loop in a run, with ``train_three_steps``.

        Raises:
            NotImplementedError: Always, because there is no session.
        """
        raise NotImplementedError("a scripted agent has no URL; test agents with their own loop in a run")

    anthropic_base_url = base_url
    api_key = base_url

    async def respond(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Record the messages, tools and stop texts, and return the next turn of the script.

        Raises:
            ScriptEnded: The script has no more turns.
            ValueError: A message is malformed, as with the agent of a run.
        """
        self.heard.append(checked_messages(messages))
        self.tools.append(tuple(tools or ()))
        self.stops.append(tuple(stop))
        if not self._turns:
            raise ScriptEnded(f"the script has {self._num_turns} turns, and one more was requested")
        return self._turns.pop(0)

    def keep(self, name: str, data: bytes | str) -> Path | None:
        """Store a file in ``kept``. Nothing is written to disk."""
        self.kept[name] = data
        return None

    def count_tool_call(self, status: ToolStatus, *, took_s: float | None = None) -> None:
        """Count a tool call in ``tool_calls``, and add its duration to ``tool_calls_s`` if given."""
        self.tool_calls[status] += 1
        if took_s is not None:
            self.tool_calls_s.append(took_s)

    def waiting_for_person(self) -> AbstractContextManager[None]:
        """Return a context manager without effect, because there are no deadlines to suspend."""
        return nullcontext()


class ScriptedGenerator:
    """Samples the texts of a script as tokens, and records the tokens of each path.

    Call it with a ``TurnRequest``, as an episode does. The request names the turn to continue, and the tokens
    to append before the new turn. ``paths`` then has the tokens that a trainer would get.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], *, cut: bool = False
    ) -> None:
        """Create a generator.

        Args:
            tokenizer: Tokenizer of the texts.
            texts: Texts of the turns, in order.
            cut: Whether every turn ends at its length limit, rather than with the end token.
        """
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._num_texts = len(texts)
        self._cut = cut
        self.paths: list[list[int]] = []
        """Tokens of each turn's path, from the first prompt to the end of the turn."""
        self.requests: list[TurnRequest] = []

    @property
    def ids(self) -> list[int]:
        """Tokens of the newest turn's path."""
        return self.paths[-1]

    @property
    def max_tokens(self) -> list[int]:
        """Token limits of the requests."""
        return [request.max_tokens for request in self.requests]

    async def __call__(self, request: TurnRequest) -> SampledTurn | None:
        """Sample the next text of the script for a request.

        Raises:
            ScriptEnded: The script has no more texts.
        """
        assert request.given_ids.dtype == np.int32
        self.requests.append(request)
        before = [] if request.after is None else self.paths[request.after]
        return self.say([*before, *request.given_ids.tolist()])

    def say(self, before: Sequence[int] = ()) -> SampledTurn:
        """Sample the next text of the script after the tokens ``before``.

        Raises:
            ScriptEnded: The script has no more texts.
        """
        if not self._texts:
            raise ScriptEnded(f"the script has {self._num_texts} turns, and one more was requested")
        text = self._texts.pop(0)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not self._cut:
            ids.append(self._tokenizer.eos_token_id)
        self.paths.append([*before, *ids])
        return SampledTurn(
            turn=len(self.paths) - 1,
            ids_T=np.asarray(ids, np.int32),
            text=text,
            finish_reason=FinishReason.LENGTH if self._cut else FinishReason.STOP,
            first_version=0,
            version=0,
        )


def run_episode(
    environment: Environment,
    task: Task,
    *texts: str,
    episodes: EpisodesSection | None = None,
    max_context_length: int = 4096,
    limit_s: float = 60.0,
) -> EpisodeOutcome:
    """Run one episode as a run does, with a model that answers with ``texts``.

    Deadlines, the limit on turns and the context length apply, and an exception of the environment becomes
    an ending. The tokenizer has one token per character and a ChatML template.

        outcome = run_episode(TryAgain(), task, "5", "4")
        assert outcome.ending == "completed" and outcome.agents[0].score.value == 0.5

    Args:
        environment: Environment to test.
        task: Task of the episode.
        texts: Texts of the model's turns, in order.
        episodes: The config's section ``episodes``; its defaults if None.
        max_context_length: Maximum number of tokens of the conversation.
        limit_s: Time limit of the episode in seconds (``timeouts.episode_s``).

    Returns:
        The ending of the episode, the score of each agent, and the record of the conversation.

    Raises:
        ScriptEnded: The environment requested more turns than there are texts.
    """
    section = EpisodesSection() if episodes is None else episodes
    tokenizer = character_tokenizer(chat_template=True)
    generator = ScriptedGenerator(tokenizer, texts)
    runner = Episodes(
        environment,
        choose_renderer(tokenizer, chat_template=True).renderer,
        name=type(environment).__name__,
        roles=[AgentRole(name="agent", is_trainable=True)],
        has_one_agent=True,
        max_context_length=max_context_length,
        section=section,
        limit_s=limit_s,
    )

    async def sample(episode: EpisodeId, request: TurnRequest) -> SampledTurn | None:
        return await generator(request)

    return asyncio.run(
        runner.run(
            task,
            EpisodeId(group_id=0, index=0),
            max_turn_tokens=max_context_length,
            sample=sample,
            keeps_record=True,
        )
    )


class _NoWaiting(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The loop passes the time until its next timer. Count it without waiting.
        self.now_s += timeout or 0.0
        return super().select(0)


class HandClock:
    """Clock whose time a test sets.

        >>> clock = fa.testing.HandClock()
        >>> clock.advance(2.5)
        >>> clock()
        2.5

    A call returns the time in seconds, which begins at 0.
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance the clock by ``seconds``."""
        self._now_s += seconds


class VirtualTime:
    """Runs a coroutine on an event loop whose timers expire without waiting.

        >>> time = fa.testing.VirtualTime()
        >>> time.run(asyncio.sleep(3600.0, "done"))
        'done'
        >>> time.now_s()
        3600.0

    When nothing else is left to do, the loop's clock advances to the next timer.
    """

    def __init__(self) -> None:
        self._selector = _NoWaiting()

    def now_s(self) -> float:
        """Return the time of the clock in seconds."""
        return self._selector.now_s

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, and return its result."""
        loop = asyncio.SelectorEventLoop(self._selector)
        loop.time = self.now_s  # type: ignore[method-assign]  # put in place of the loop's own clock
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()


class _WaitsForEvents(selectors.SelectSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # A timer only ends a wait if it is due. Code that moves the clock runs on the loop, which then checks
        # its timers again.
        return super().select(0 if timeout == 0 else None)


class HandTime(HandClock):
    """Runs a coroutine on an event loop whose timers expire only when ``advance`` moves the clock.

    Threads, processes and sockets work as usual. A sleep without an ``advance`` never ends.
    """

    async def pass_until(self, is_reached: Callable[[], bool], *, step_s: float = 0.1) -> None:
        """Advance the clock in steps of ``step_s`` until ``is_reached`` returns True."""
        while not is_reached():
            self.advance(step_s)
            await asyncio.to_thread(time.sleep, 0.001)

    async def stand_until(self, is_reached: Callable[[], bool]) -> None:
        """Wait without advancing the clock until ``is_reached`` returns True.

        Use it to wait for threads, processes or sockets, without expiring deadlines.
        """
        while not is_reached():
            await asyncio.to_thread(time.sleep, 0.001)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, and return its result."""
        loop = asyncio.SelectorEventLoop(_WaitsForEvents())
        loop.time = self  # type: ignore[method-assign]  # put in place of the loop's own clock
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(coroutine)


_TEXTS = (
    "State the final answer to the following arithmetic problem: 0123456789 + 4 - 5 =",
    "0123456789+1=2;3-4=5#6",
)


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tie: bool = False,
    scale: float = 1.0,
    num_experts: int = 4,
    top_k: int = 2,
) -> Path:
    """Write a Qwen3-MoE of two layers and 64 dimensions as a Hugging Face folder, and return the folder.

    The weights are random, in float32. The tokenizer has a token for each character of sums such as ``1+2=``.

    Args:
        folder: Folder to write.
        seed: Random seed of the weights.
        tie: Whether the output layer shares the weights of the embedding.
        scale: Factor on the weights' standard deviation of 0.02. Larger values make outputs less uniform.
        num_experts: Number of experts of each layer.
        top_k: Number of experts for each token.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = build_tokenizer(_TEXTS)
    # transformers does not declare head_dim, which every model of this class has.
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=160,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Drawn again, because transformers leaves the padding token's embedding at zero.
                parameter.normal_(std=0.02 * scale)
    model.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(tokenizer, folder)
    return folder


def tiny_config(model: Path) -> RunConfig:
    """Return the config of a run of three steps on sums, with two trainer processes and one generator.

    Args:
        model: Folder that ``write_tiny_model`` wrote.
    """
    return RunConfig(
        name="tiny",
        max_steps=3,
        model=ModelSection(path=str(model), max_context_length=160),
        data=DataSection(
            source=ReasoningGymSource(
                kind="reasoning_gym",
                task="chain_sum",
                options={"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
                answer_prefix="#",
            ),
            num_train=64,
            num_held_out=8,
        ),
        sampling=SamplingSection(max_response_tokens=24),
        generator=GeneratorSection(max_num_seqs=32, max_num_batched_tokens=512, kv_cache_gib=0.05),
        trainer=TrainerSection(
            parallel=ParallelSection(num_procs=2, expert=2),
            tokens_per_row=256,
            optimizer=OptimizerSection(learning_rate=1e-3),
        ),
        algorithm=AlgorithmSection(group_size=4, groups_per_step=4),
        payload=PayloadSection(capacity_gib=0.02),
        evaluation=EvaluationSection(num_problems=8),
    )


def train_three_steps(
    folder: Path,
    overrides: Overrides = (),
    *,
    reward: Callable[..., object] | Section | None = None,
    environment: Callable[..., object] | Section | None = None,
    objective: Callable[..., object] | Section | None = None,
    advantage: Callable[..., object] | Section | None = None,
) -> TrainResult:
    """Train a tiny random model for three steps, with all processes of a run. It takes half a minute.

    The model and the run are written to ``folder``. The other arguments are those of ``fa.train``.

        result = train_three_steps(tmp_path, environment=TryAgain)
        assert result.metrics[-1]["step"] == 3

    Raises:
        ConfigError: An override or another argument is wrong.
        TrainingFailed: The run ended before its last step, for instance because your code raised.
    """
    config = tiny_config(write_tiny_model(folder / "model"))
    return train(
        config.model_copy(update={"run_dir": str(folder / "run")}),
        overrides,
        reward=reward,
        environment=environment,
        objective=objective,
        advantage=advantage,
    )
