"""GGUF files into Hugging Face folders, against the model and tokenizer they were written from."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from apps.import_gguf import find_in_package, import_gguf
from forgeasync.models import check_checkpoint_shapes, read_model_facts
from forgeasync.schema import ConfigError
from tests.support.gguf_files import (
    SPECIAL_TOKENS,
    TEXTS,
    quantize_weights,
    small_model,
    small_tokenizer,
    write_gguf,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    return small_model(tokenizer.get_vocab_size(), tied=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: LlamaForCausalLM, tokenizer: Tokenizer) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    import_gguf(write_gguf(root / "model.gguf", model, tokenizer), root / "folder")
    return root / "folder"


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        (GGMLQuantizationType.F32, True),
        (GGMLQuantizationType.F32, False),
        (GGMLQuantizationType.Q8_0, True),
        (GGMLQuantizationType.Q4_1, False),
    ],
)
def test_imported_weights_are_the_ones_that_blocks_stand_for(
    tmp_path: Path, tokenizer: Tokenizer, kind: GGMLQuantizationType, tied: bool
) -> None:
    original = small_model(tokenizer.get_vocab_size(), tied=tied)
    quantize_weights(original, kind)
    file = write_gguf(tmp_path / "model.gguf", original, tokenizer, kind=kind)
    import_gguf(file, tmp_path / "folder")
    imported = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    others = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)

    assert imported.config.tie_word_embeddings is tied
    for name, weight in original.state_dict().items():
        # Blocks quantized a second time may round once more, by a bit of their 16-bit scales.
        torch.testing.assert_close(imported.state_dict()[name], weight, rtol=0.0, atol=2e-3)
        assert torch.equal(imported.state_dict()[name], others.state_dict()[name]), name
    ids = torch.tensor([tokenizer.encode(TEXTS[0]).ids])
    with torch.no_grad():
        torch.testing.assert_close(imported(ids).logits, others(ids).logits, rtol=0.0, atol=1e-5)


def test_unquantized_model_comes_back_bit_for_bit(folder: Path, model: LlamaForCausalLM) -> None:
    imported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert imported.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(imported.state_dict()[name], weight), name


def test_config_says_what_the_original_says(folder: Path, model: LlamaForCausalLM) -> None:
    facts = read_model_facts(str(folder))
    assert check_checkpoint_shapes(folder, facts) == []
    assert facts.rope_theta == 100000.0
    assert facts.rms_norm_eps == 1e-5
    assert facts.tie_word_embeddings
    assert facts.max_position_embeddings == model.config.max_position_embeddings
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize(
    "text", [*TEXTS, "a\n\n1", "spaces   42", "naïve 漢字 🎉", "<|im_start|>user\n7<|im_end|>"]
)
def test_tokenizer_encodes_as_the_original(folder: Path, tokenizer: Tokenizer, text: str) -> None:
    imported = AutoTokenizer.from_pretrained(folder)
    ids = imported(text, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer.encode(text).ids
    assert imported.decode(ids) == text


def test_special_tokens_and_chat_template_are_kept(folder: Path) -> None:
    imported = AutoTokenizer.from_pretrained(folder)
    assert set(imported.all_special_tokens) == set(SPECIAL_TOKENS)
    assert (imported.bos_token, imported.eos_token, imported.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    rendered = imported.apply_chat_template(
        [{"role": "user", "content": "3 + 4?"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n"


REFUSED = {
    "architecture": ({"architecture": "mamba"}, "general.architecture 'mamba'; only 'llama'"),
    "splitting": ({"splitting": "tekken"}, "tokenizer.ggml.pre 'tekken'; only 'smollm'"),
    "rope_scaling": ({"rope_scaling": True}, "llama.rope.scaling.factor = 2.0"),
    "extra_tensor": (
        {"extra_tensors": {"rope_freqs.weight": np.ones(8, np.float32)}},
        "tensor rope_freqs.weight has no place",
    ),
    "missing_tensor": (
        {"left_out": "blk.1.attn_k.weight"},
        "lacks the tensor of model.layers.1.self_attn.k_proj",
    ),
    "extra_layer": (
        {"extra_tensors": {"blk.2.attn_norm.weight": np.ones(64, np.float32)}},
        "a tensor of model.layers.2.input_layernorm.weight, for which",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_model_is_refused(
    tmp_path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, case: str
) -> None:
    changes, message = REFUSED[case]
    file = write_gguf(tmp_path / "model.gguf", model, tokenizer, **changes)
    with pytest.raises(ConfigError) as refusal:
        import_gguf(file, tmp_path / "folder")
    assert message in str(refusal.value)
    assert str(file) in str(refusal.value)
    assert list(tmp_path.iterdir()) == [file]


def test_files_and_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "folder")
    text = tmp_path / "text.gguf"
    for content in ("", "no model at all, but a text that is long enough"):
        text.write_text(content)
        with pytest.raises(ConfigError, match="not a readable GGUF file"):
            import_gguf(text, tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"output = .* exists already"):
        import_gguf(text, tmp_path)


def test_a_cut_off_file_is_refused(tmp_path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    file = write_gguf(tmp_path / "model.gguf", model, tokenizer)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        import_gguf(file, tmp_path / "folder")


def test_a_package_must_ship_one_file() -> None:
    with pytest.raises(ConfigError, match="not an installed package"):
        find_in_package("no_such_package_here")
    with pytest.raises(ConfigError, match="has 0 GGUF files"):
        find_in_package("json")


def test_a_package_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ships_gguf"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "small.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_in_package("ships_gguf") == package / "small.gguf"
