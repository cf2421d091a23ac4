"""A model whose weights count how often each group was trained on.

Each prompt is one token of its own, and each response is one token that is never an input. So only the steps
that train a prompt's group change its row of the embedding. AdamW has betas of 0 and a constant learning
rate, so that its update is ``learning_rate * g / (|g| + eps)``: one learning rate up or down where there is a
gradient, 0 elsewhere. (The size of SGD's update would be that of the gradient.) After one training, each
number of a row has moved by one learning rate. After two it has moved by two or by none, because the sign of
a gradient can change. Without training it has not moved. This reads nothing but the weights of the exported
model.

The loss makes sampled tokens less likely, whatever their reward, so that no gradient vanishes.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from chaos_report import read_lines
from common import write_model

CONFIG = Path(__file__).resolve().parent / "data" / "witness.yaml"
LEARNING_RATE = 2.0**-10
"""A power of two, so that rounding changes it by less than a thousandth when it is added to a weight."""

GROUPS_PER_STEP = 2
NUM_SPARE_STEPS = 60
"""Steps whose prompts are for groups that are sampled and not trained on."""

FIRST_CHARACTER = 0x4E00
"""The first of 20,000 characters, each of which is one token."""

MAX_PROMPTS = 20_000

REWARD_S = 0.2
"""Time for scoring a response. A step then takes two seconds, and a role can recover before the run is
over."""

MOVED = 0.02
"""Tolerance in learning rates of a number's movement."""

MOST = 0.9
"""Share of a row's numbers that have to agree: a gradient that is 0 or underflows is rare."""


def num_prompts(num_steps: int) -> int:
    """Return the number of prompts for a run, which must not reach any of them twice."""
    return GROUPS_PER_STEP * (num_steps + NUM_SPARE_STEPS)


def prompt(number: int) -> str:
    """Return the text of a prompt, which is one character."""
    return chr(FIRST_CHARACTER + number)


def problems(split: str, seed: int, num: int) -> list[dict[str, object]]:
    """Return the data of the run (``kind: python``)."""
    if split == "held_out":
        return [{"question": str(number), "answer": "none"} for number in range(8)]
    return [{"question": prompt(number), "answer": "none"} for number in range(num)]


def less_likely(row: Any) -> Any:
    """Return the objective of the run (``kind: python``): the log-probabilities of the sampled tokens."""
    return row.logprobs_T, {}


def reward(task: Any, response: Any) -> float:
    """Return the reward of the run (``kind: python``), which the loss ignores, after ``REWARD_S``."""
    time.sleep(REWARD_S)
    return 0.0


def write(folder: Path, *, num_steps: int) -> Path:
    """Write the model and the run's config. Returns the config's file.

    Raises:
        ValueError: there are too few prompts.
    """
    import yaml

    from forgeasync.models import build_tokenizer, save_tokenizer

    num = num_prompts(num_steps)
    if num > MAX_PROMPTS:
        raise ValueError(f"--witness: {num_steps} steps take {num} prompts; must be at most {MAX_PROMPTS}")
    tokenizer = build_tokenizer([*map(prompt, range(num)), "0123456789?"])
    # The weights are larger than usual.
    write_model(folder / "model", vocab_size=len(tokenizer), initializer_range=0.1)
    save_tokenizer(tokenizer, folder / "model")
    file = folder / "run.yaml"
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["max_steps"] = num_steps
    config["model"]["path"] = str((folder / "model").resolve())
    config["data"]["num_train"] = config["data"]["source"]["options"]["num"] = num
    config["trainer"]["optimizer"]["learning_rate"] = LEARNING_RATE
    config["algorithm"]["groups_per_step"] = GROUPS_PER_STEP
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def counts(before: Any, after: Any) -> list[int | None]:
    """Return how often each row of an embedding [V, D] was trained on; None if that is no whole number.

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
    """Return why the exported weights do not show that each group in rollouts.jsonl was trained on once."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    final = run_dir / "checkpoints" / "final"
    if not final.is_dir():
        return f"the run has exported no model to {final}"
    before, after = (
        {name: tensor for file in one.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for one in (folder / "model", final)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    name = "model.embed_tokens.weight"
    times = counts(before[name], after[name])
    trained = set()
    for text in {line["prompt"] for line in read_lines(run_dir / "rollouts.jsonl")}:
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
