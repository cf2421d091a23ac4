"""A model whose weights count how often each group was trained on.

Every prompt is one token that no other prompt has, and every response is one token, which is never an input
of the model. So a row of the embedding is touched by the steps that train its prompt's group, and by no
others. Moments are switched off (betas of 0) and the learning rate is constant: AdamW's update of a number
is then ``learning_rate * g / (|g| + eps)``, one learning rate up or down wherever there is a gradient, and
exactly 0 where there is none. With one training, every number of a row has moved by one learning rate; with
two, by two or by none (the sign of a gradient can change between two steps); without, by none at all.
Nothing but the weights of the exported model is read for that: no ledger, no log.

The loss makes what was sampled less likely, whatever it was worth, so that no gradient vanishes.

(Plain SGD, whose update is the gradient itself, would need gradients of a known size: Adam without moments
has steps of a known size instead.)
"""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import REPOSITORY

LEARNING_RATE = 2.0**-10
"""A power of two: sums of it and a weight are rounded by less than one part in a thousand of it."""

GROUPS_PER_STEP = 2
GROUP_SIZE = 4
NUM_SPARE_STEPS = 60
"""Prompts for groups that are sampled and never trained on: the buffer's, and those that are given up."""

FIRST_CHARACTER = 0x4E00
"""The first of 20,000 characters, each of which is a token of its own."""

MAX_PROMPTS = 20_000

REWARD_S = 0.2
"""Time for a response's reward: a step takes two seconds with it."""

MOVED = 0.02
"""A number has moved n times if it has moved by n learning rates, and by this share of one more or less."""

MOST = 0.9
"""Share of a row's numbers that have to agree. A gradient of exactly 0, or one that underflows, is rare."""


def num_prompts(num_steps: int) -> int:
    """Return how many prompts a run of so many steps is given: it may not come to any of them twice."""
    return GROUPS_PER_STEP * (num_steps + NUM_SPARE_STEPS)


def prompt(number: int) -> str:
    """Return the text of a prompt: one character."""
    return chr(FIRST_CHARACTER + number)


def problems(split: str, seed: int, num: int) -> list[dict[str, object]]:
    """The data of the run (``kind: python``)."""
    if split == "held_out":
        return [{"question": str(number), "answer": "none"} for number in range(8)]
    return [{"question": prompt(number), "answer": "none"} for number in range(num)]


def less_likely(row: Any) -> Any:
    """The objective of the run (``kind: python``): log-probabilities of what was sampled."""
    return row.logprobs_T, {}


def reward(task: Any, response: Any) -> float:
    """The reward of the run (``kind: python``): nothing is made of it, after a while.

    Without a wait steps would take a tenth of a second, and the run would be over before a role is back.
    """
    time.sleep(REWARD_S)
    return 0.0


def environment() -> dict[str, str]:
    """Return variables with which the run finds this module; see also ``chaos_orders``."""
    from chaos_orders import INSIDE

    path = [str(INSIDE), str(REPOSITORY), str(Path(__file__).resolve().parent)]
    return {"PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}


def write(folder: Path, *, num_steps: int) -> Path:
    """Write the model and the run's config; returns the config's file.

    Raises:
        ValueError: there are not so many prompts.
    """
    import torch
    import yaml
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from forgeasync.models import build_tokenizer, save_tokenizer

    num = num_prompts(num_steps)
    if num > MAX_PROMPTS:
        raise ValueError(f"--witness: {num_steps} steps take {num} prompts; must be at most {MAX_PROMPTS}")
    tokenizer = build_tokenizer([*map(prompt, range(num)), "0123456789?"])
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=160,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model")
    file = folder / "run.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "witness",
                "max_steps": num_steps,
                "max_off_policy_steps": 2,
                "model": {"path": str((folder / "model").resolve()), "max_context_length": 64},
                "data": {
                    "source": {
                        "kind": "python",
                        "factory": "chaos_witness.problems",
                        "options": {"num": num},
                    },
                    "reward": {"kind": "python", "factory": "chaos_witness.reward"},
                    "num_train": num,
                    "num_held_out": 8,
                },
                "sampling": {"max_response_tokens": 1},
                "generator": {"max_num_seqs": 32, "max_num_batched_tokens": 512, "kv_cache_gib": 0.05},
                "trainer": {
                    "parallel": {"num_procs": 2, "expert": 2},
                    "tokens_per_row": 64,
                    "optimizer": {
                        "learning_rate": LEARNING_RATE,
                        "betas": [0.0, 0.0],
                        "eps": 1e-20,
                        "max_grad_norm": 1e30,
                    },
                },
                "algorithm": {
                    "group_size": GROUP_SIZE,
                    "groups_per_step": GROUPS_PER_STEP,
                    "objective": {"kind": "python", "factory": "chaos_witness.less_likely"},
                },
                "payload": {"capacity_gib": 0.02},
                "evaluation": {"num_problems": 8},
            }
        ),
        encoding="utf-8",
    )
    return file


def counts(before: Any, after: Any) -> list[int | None]:
    """Return by row of two embeddings [V, D] how often it was trained on; None: by no whole number of times.

    A row was trained on once if nearly all of its numbers have moved by one learning rate.
    """
    moved_VD = (after.double() - before.double()).abs() / LEARNING_RATE
    found: list[int | None] = []
    for row_D in moved_VD:
        if not row_D.any():
            found.append(0)
        elif ((row_D - 1.0).abs() < MOVED).double().mean() >= MOST:
            found.append(1)
        else:
            # Twice: two learning rates, or none where the sign has changed.
            highest = int(row_D.round().max())
            near = ((row_D - row_D.round()).abs() < MOVED * max(1, highest)).double().mean() >= MOST
            found.append(highest if near and highest > 1 else None)
    return found


def problem(run_dir: Path, folder: Path) -> str | None:
    """Return why the exported weights do not say that every group was trained on once.

    The groups that have to have been trained on are those of the batches in rollouts.jsonl.
    """
    from chaos_injector import read_lines
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    name = "model.embed_tokens.weight"
    final = run_dir / "checkpoints" / "final"
    if not final.is_dir():
        return f"the run has exported no model to {final}"
    before, after = (load_all(one, name, load_file) for one in (folder / "model", final))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    times = counts(before, after)
    prompts = {line["prompt"] for line in read_lines(run_dir / "rollouts.jsonl")}
    trained = set()
    for text in prompts:
        (token,) = tokenizer(text, add_special_tokens=False)["input_ids"]
        trained.add(token)
        if times[token] != 1:
            return f"prompt {text!r} was trained on, and its row says {times[token]} times"
    first = tokenizer(prompt(0), add_special_tokens=False)["input_ids"][0]
    for token, found in enumerate(times):
        if token >= first and token not in trained and found != 0:
            return f"token {token} is of no prompt that was trained on, and its row says {found} times"
    most = Counter(times).most_common(3)
    print(f"counting witness: {len(trained)} prompts were trained on, each once (rows by times: {most})")
    return None


def load_all(folder: Path, name: str, load_file: Any) -> Any:
    """Return a tensor of a Hugging Face folder."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        if name in tensors:
            return tensors[name]
    raise ValueError(f"{folder} has no tensor {name}")
