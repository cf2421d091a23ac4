"""Builds a tiny Qwen3-MoE that can play games, call tools and end its turns, from a minute of demonstrations.

    python -m examples.agents.model models/tiny_agent [--steps N]

The model has a chat template with tools for the environments of configs/game_cpu.yaml, mcp_cpu.yaml and
coding_cpu.yaml. It is often wrong, which leaves room for RL.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.agents.games import begin
from examples.agents.repositories import repositories
from examples.agents.stock import ITEMS, NUM_SHELVES, num_in_stock, question
from forgeasync.config import Bubblewrap, StdioServer
from forgeasync.environments import McpTools, Message, Tool, ToolSpec, tool_forms
from forgeasync.isolation import Sandbox
from forgeasync.models import save_tokenizer
from forgeasync.plugins.coding import HOW_TO_WORK, CodingTools

START, END, PADDING = "<|im_start|>", "<|im_end|>", "<pad>"
VOCABULARY_SIZE = 1024
CONTEXT_LENGTH = 2048
NUM_OF_EACH_KIND = 400
NUM_READ_FOR_VOCABULARY = 400
EXAMPLES_PER_STEP = 6
LEARNING_RATE = 3e-3
REPORT_EVERY = 25
IGNORED = -100
"""Label of tokens that are not trained on."""

LOW, HIGH, MAX_GUESSES = 1, 9, 4
"""Options of the game in configs/game_cpu.yaml."""

TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
    "{{- 'Tools:' }}{% for tool in tools %}{{ '\n' + (tool.function | tojson) }}{% endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{{ '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{%- if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation, including the model's turns, and the tools that are in its prompt."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


def calls(name: str, **arguments: object) -> Message:
    """Return a message of the model that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def says(role: str, content: str) -> Message:
    """Return a message."""
    return {"role": role, "content": content}


def play(rng: random.Random) -> Demonstration:
    """Demonstrate a game, with guesses that are consistent with the replies but not optimal."""
    seed = rng.getrandbits(48)
    game = begin("guess_number", seed, low=LOW, high=HIGH, max_guesses=MAX_GUESSES)
    messages = [says("user", f"Game {seed}. {game.opening}")]
    low, high = LOW, HIGH
    while True:
        guess = rng.randint(low, high)
        reply = game.play(str(guess))
        messages.append(says("assistant", f"[{guess}]"))
        if reply.is_over:
            return Demonstration(messages=tuple(messages))
        low, high = (guess + 1, high) if "higher" in reply.text else (low, guess - 1)
        messages.append(says("user", reply.text))


def ask_stock(rng: random.Random, tools: tuple[dict[str, Any], ...]) -> Demonstration:
    """Demonstrate looking up a number and answering with it."""
    shelf, item = rng.randint(1, NUM_SHELVES), rng.choice(ITEMS)
    number = str(num_in_stock(shelf, item))
    return Demonstration(
        messages=(
            says("user", question(shelf, item)),
            calls("stock", item=item, shelf=shelf),
            says("tool", number),
            says("assistant", number),
        ),
        tools=tools,
    )


def mend(rng: random.Random, tools: tuple[dict[str, Any], ...]) -> Demonstration:
    """Demonstrate reading a module, replacing an expression and submitting; some edits are wrong."""
    all_of_them = list(repositories())
    repository = rng.choice(all_of_them)
    fault = repository.fault if rng.random() < 0.7 else rng.choice(all_of_them).fault
    path = f"{repository.name}.py"
    changed = (
        f"{path} was changed"
        if fault is repository.fault
        else f"Error: old occurs 0 times in {path}; must occur exactly once"
    )
    return Demonstration(
        messages=(
            says("system", HOW_TO_WORK),
            says("user", repository.issue),
            calls("run", command=f"cat {path}"),
            says("tool", f"{repository.source}[exit code 0]"),
            calls("edit", path=path, old=fault.wrong, new=fault.right),
            says("tool", changed),
            calls("submit"),
        ),
        tools=tools,
    )


def stock(item: str, shelf: int) -> str:
    """Say how many of an item are on a shelf."""
    return str(num_in_stock(shelf, item))


def stock_tools() -> tuple[dict[str, Any], ...]:
    """Return the tools that the server of configs/mcp_cpu.yaml lists."""

    async def listed() -> list[ToolSpec]:
        server = StdioServer(command=(sys.executable, "-m", "examples.agents.stock"), cwd=".")
        async with McpTools({"stock": server}) as mcp:
            return [tool.spec for tool in mcp.tools]

    return tuple(tool_forms(asyncio.run(listed())))


def coding_tools() -> tuple[dict[str, Any], ...]:
    """Return the tools of the ``coding`` environment."""
    bench = CodingTools(Sandbox(Bubblewrap()), command_s=1.0)
    return tuple(tool_forms([tool.spec for tool in bench.tools]))


def demonstrations(rng: random.Random, num: int) -> list[Demonstration]:
    """Return ``num`` demonstrations of each kind, interleaved, and of looking numbers up with either tool."""
    of_mcp, of_coding = stock_tools(), coding_tools()
    of_function = tuple(tool_forms([Tool.from_function(stock).spec]))
    found = []
    for _ in range(num):
        found += [play(rng), ask_stock(rng, of_mcp), ask_stock(rng, of_function), mend(rng, of_coding)]
    return found


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on ``texts``, with one token per digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    turn_marks = [AddedToken(one, special=True) for one in (PADDING, START, END)]
    # These are not special tokens, because they are part of the model's text.
    call_marks = [AddedToken(one, special=False, normalized=False) for one in ("<tool_call>", "</tool_call>")]
    training = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(turn_marks) - len(call_marks),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, training)
    tokenizer.add_special_tokens(turn_marks)
    tokenizer.add_tokens(call_marks)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING)
    fast.chat_template = TEMPLATE
    return fast


def pieces(demonstration: Demonstration, template: PreTrainedTokenizerFast) -> list[tuple[str, bool]]:
    """Return the rendered conversation in parts, each with whether the model wrote it."""
    messages = [dict(message) for message in demonstration.messages]
    rendered = template.apply_chat_template(messages, tools=list(demonstration.tools) or None, tokenize=False)
    assert isinstance(rendered, str)
    prompt = f"{START}assistant\n"
    before, *turns = rendered.split(prompt)
    found = [(before + prompt, False)]
    for number, turn in enumerate(turns, 1):
        said, _, after = turn.partition(END)
        found.append((said + END, True))
        if number < len(turns):
            found.append((after + prompt, False))
    return found


def encoded(
    parts: Sequence[tuple[str, bool]], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    """Return token ids, and labels with ``IGNORED`` for tokens that the model did not write.

    Parts are encoded separately, as in a run, which appends each turn to the tokens before it.
    """
    ids: list[int] = []
    labels: list[int] = []
    for text, is_said in parts:
        of_part = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += of_part
        labels += of_part if is_said else [IGNORED] * len(of_part)
    return ids, labels


def random_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """Return a randomly initialized model: two layers, hidden size 128, four experts."""
    # transformers does not declare the argument head_dim of this class.
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3MoeForCausalLM(config).float()


def imitate(
    model: Qwen3MoeForCausalLM,
    examples: Sequence[tuple[list[int], list[int]]],
    *,
    num_steps: int,
    padding: int,
) -> None:
    """Train on the model's turns in demonstrations, in small batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps)
    for step in range(1, num_steps + 1):
        first = (step - 1) * EXAMPLES_PER_STEP % len(examples)
        batch = [examples[(first + number) % len(examples)] for number in range(EXAMPLES_PER_STEP)]
        length = max(len(ids) for ids, _ in batch)
        ids_BL = torch.tensor([ids + [padding] * (length - len(ids)) for ids, _ in batch])
        labels_BL = torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in batch])
        loss = model(input_ids=ids_BL, labels=labels_BL).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == num_steps:
            print(f"step {step}/{num_steps}  loss {loss.item():.4f}", flush=True)


def write_model(folder: Path, *, num_steps: int) -> None:
    """Train the model on demonstrations and write its folder."""
    rng = random.Random(0)
    torch.manual_seed(0)
    template = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=TEMPLATE)
    parts = [pieces(one, template) for one in demonstrations(rng, NUM_OF_EACH_KIND)]
    tokenizer = make_tokenizer([text for one in parts[:NUM_READ_FOR_VOCABULARY] for text, _ in one])
    model = random_model(tokenizer)
    examples = [encoded(one, tokenizer) for one in parts]
    print(
        f"{len(examples)} demonstrations of up to {max(len(ids) for ids, _ in examples)} tokens", flush=True
    )
    imitate(model, examples, num_steps=num_steps, padding=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(tokenizer, folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the model of the configs game, mcp and coding.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    write_model(given.folder, num_steps=given.steps)
