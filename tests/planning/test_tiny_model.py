"""The tiny model's folder: what transformers and this package read of it, for every family."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forgeasync.config import GeneratorSection, ParallelSection
from forgeasync.models import (
    FAMILIES,
    NUM_CHARACTER_TOKENS,
    SHIPPED_MODELS,
    character_tokenizer,
    check_checkpoint_shapes,
    parse_model_facts,
    read_model_facts,
)
from forgeasync.planning import small_facts, write_model
from forgeasync.rollouts import PromptEncoder
from tests.support.families import VARIANTS

SHIPPED = {folder.name: folder / "config.json" for folder in sorted(SHIPPED_MODELS.iterdir())}


def _raw(name: str) -> dict[str, object]:
    if name in SHIPPED:
        return json.loads(SHIPPED[name].read_text())
    raw = json.loads(VARIANTS[name]().to_json_string())
    return raw | {"architectures": [FAMILIES[raw["model_type"]].architecture]}


@pytest.mark.parametrize("name", [*sorted(VARIANTS), *SHIPPED])
def test_a_folder_is_a_model_of_its_family(name: str, tmp_path: Path) -> None:
    raw = _raw(name)
    if "layer_types" in raw:
        # More layers than the tiny model has.
        raw |= {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    facts = small_facts(
        parse_model_facts(raw, name),
        ParallelSection(num_procs=4, expert=2 if "moe" in name or "-A" in name else 1),
        GeneratorSection(tensor_parallel=2),
        max_context_length=192,
        on_gpus=False,
    )
    folder = tmp_path / "model"
    write_model(folder, raw, facts, chat_template=True, template_arguments=["enable_thinking"], seed=3)
    assert read_model_facts(str(folder)) == facts
    assert check_checkpoint_shapes(folder, facts) == []
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == raw["model_type"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = PromptEncoder(tokenizer, chat_template=True, template_arguments={"enable_thinking": False})
    ids = torch.from_numpy(prompts.encode("1 + 1 =")).long()[None]
    with torch.no_grad():
        logits_V = model(ids).logits[0, -1]
    assert logits_V.shape == (facts.vocab_size,) == (NUM_CHARACTER_TOKENS,)
    # A random model's: neither all alike nor nearly certain.
    assert 0.1 < float(logits_V.std()) < 10.0


def test_a_seed_gives_the_same_weights(tmp_path: Path) -> None:
    raw = _raw("qwen3_moe")
    facts = dataclasses.replace(parse_model_facts(raw, "x"), vocab_size=NUM_CHARACTER_TOKENS)
    written = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_model(tmp_path / name, raw, facts, chat_template=False, template_arguments=(), seed=seed)
        written.append((tmp_path / name / "model.safetensors").read_bytes())
    assert written[0] == written[1] != written[2]


def test_every_character_is_a_token_and_every_token_has_a_text() -> None:
    tokenizer = character_tokenizer(chat_template=False)
    assert len(tokenizer) == NUM_CHARACTER_TOKENS
    assert tokenizer.chat_template is None
    text = "Add 1 + 2,\nplease!"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert all(tokenizer.decode([index]) for index in range(NUM_CHARACTER_TOKENS))
    assert tokenizer("é", add_special_tokens=False)["input_ids"] == [tokenizer.unk_token_id]
