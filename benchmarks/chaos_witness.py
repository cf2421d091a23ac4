"""A model whose weights count how often each group was trained on.

Every prompt is one token that no other prompt has, and every response is one token, which is never an input
of the model. So only the steps that train a prompt's group change the prompt's row of the embedding. AdamW's
moments are off (betas of 0) and the learning rate is constant. The update of a number is then
``learning_rate * g / (|g| + eps)``: one learning rate up or down with a gradient, and exactly 0 without one.
After one training step on a group, every number of its row has moved by one learning rate. After two, it has
moved by two or by none, because a gradient's sign can change. Without any, it has not moved. The check reads
only the weights of the exported model, no ledger or log.

The loss makes sampled tokens less likely, regardless of reward, so that no gradient vanishes. Plain SGD would
not work, because the size of its updates depends on that of the gradients.
"""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import REPOSITORY

LEARNING_RATE = 2.0**-10
"""Learning rate: a power of two, so that adding it to a weight rounds it by less than 0.1 %."""

GROUPS_PER_STEP = 2
GROUP_SIZE = 4
NUM_SPARE_STEPS = 60
"""Steps' worth of extra prompts, for groups that are sampled but not trained on."""

FIRST_CHARACTER = 0x4E00
"""First of 20,000 characters, each of which is one token."""

MAX_PROMPTS = 20_000

REWARD_S = 0.2
"""Seconds that a reward takes, which makes a step take two seconds."""

MOVED = 0.02
"""Tolerance of a number's movement, as a share of the learning rate."""

MOST = 0.9
"""Minimum share of a row's numbers that must agree; zero or underflowing gradients are rare."""


def num_prompts(num_steps: int) -> int:
    """Return the number of prompts for a run of ``num_steps`` steps, which must not use any prompt twice."""
    return GROUPS_PER_STEP * (num_steps + NUM_SPARE_STEPS)


def prompt(number: int) -> str:
    """Return the text of a prompt: one character."""
    return chr(FIRST_CHARACTER + number)


def problems(split: str, seed: int, num: int) -> list[dict[str, object]]:
    """Return the data of the run (``kind: python``)."""
    if split == "held_out":
        return [{"question": str(number), "answer": "none"} for number in range(8)]
    return [{"question": prompt(number), "answer": "none"} for number in range(num)]


def less_likely(row: Any) -> Any:
    """Objective of the run (``kind: python``): the log-probability of each sampled token as its loss."""
    return row.logprobs_T, {}


def reward(task: Any, response: Any) -> float:
    """Reward of the run (``kind: python``), which takes ``REWARD_S`` and does not affect training.

    Without the wait, steps would take 0.1 s, and the run would end before a role has recovered.
    """
    time.sleep(REWARD_S)
    return 0.0


def environment() -> dict[str, str]:
    """Return the environment variables with which the run imports this module; see also ``chaos_orders``."""
    from chaos_orders import INSIDE

    path = [str(INSIDE), str(REPOSITORY), str(Path(__file__).resolve().parent)]
    return {"PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}


def write(folder: Path, *, num_steps: int) -> Path:
    """Write the model and the run's config; return the config's path.

    Raises:
        ValueError: there are not enough prompts for so many steps.
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
    """Return how often each row of two embeddings [V, D] was trained on; None for a count that is no integer.

    A row was trained on once if at least the share ``MOST`` of its numbers has moved by one learning rate.
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
    """Return a problem if the exported weights do not show that every group was trained on exactly once.

    The expected groups are those of the batches in rollouts.jsonl.
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
    """Return the tensor ``name`` of a Hugging Face folder."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        if name in tensors:
            return tensors[name]
    raise ValueError(f"{folder} has no tensor {name}")
