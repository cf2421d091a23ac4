"""Tokenizers of model folders."""

import json
from pathlib import Path

import pytest

from forgeasync.models import build_tokenizer, load_tokenizer, save_tokenizer
from tests.support.families import VARIANTS, config_json

TEXT = "State the answer: 12 - 7 ="


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plain_tokenizer_is_loaded_as_it_was_written(variant: str, tmp_path: Path) -> None:
    """Whatever the model is: transformers knows tokenizers of published models of the same type."""
    written = build_tokenizer([TEXT, "-5"])
    save_tokenizer(written, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(variant)))
    loaded = load_tokenizer(tmp_path)
    ids = loaded(TEXT)["input_ids"]
    assert ids == written(TEXT)["input_ids"] and loaded.decode(ids) == TEXT
