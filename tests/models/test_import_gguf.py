"""GGUF files into Hugging Face folders, against the model and tokenizer they were written from."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, dequantize, get_tensor_name_map, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from apps.import_gguf import find_in_package, import_gguf
from forgeasync.models import check_checkpoint_shapes, read_model_facts
from forgeasync.schema import ConfigError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXTS = [
    "The sum of 12 and 345 is 357, isn't it?\n\n 7  9\n",
    "def add(first, second):\n    return first + second  # sums\n\n1\n",
    "What is 3 + 4? It's 7. The answer is what the question asks for.",
]


def small_tokenizer() -> Tokenizer:
    """Byte-level BPE split as SmolLM's is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=352,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def small_model(vocab_size: int, *, tied: bool) -> LlamaForCausalLM:
    """Random weights; four heads over two of keys and values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


def quantize_weights(model: LlamaForCausalLM, kind: GGMLQuantizationType) -> None:
    """Round matrices to what blocks of ``kind`` can hold."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind)))


def write_gguf(
    file: Path,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    splitting: str = "smollm",
    rope_scaling: bool = False,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    left_out: str | None = None,
) -> Path:
    """Write a model as llama.cpp's converter does; the last five arguments are for files to refuse."""
    config = model.config
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if rope_scaling:
        writer.add_rope_scaling_factor(2.0)
    _add_tokenizer(writer, tokenizer, splitting)
    for name, weight in _tensors(model).items():
        if name != left_out:
            stored = kind if weight.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(name, quantize(weight, stored), raw_dtype=stored)
    for name, extra in (extra_tensors or {}).items():
        writer.add_tensor(name, extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, splitting: str) -> None:
    spelled = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(spelled["vocab"], key=spelled["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in spelled["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """GGUF's names and weights; rows of queries and keys with the two of a rotary pair side by side."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # convert_hf_to_gguf.py, LlamaModel.permute
            num_heads = weight.shape[0] // model.config.head_dim
            halves = weight.reshape(num_heads, 2, model.config.head_dim // 2, weight.shape[1])
            weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
        tensors[names.get_name(name, try_suffixes=(".weight",))] = weight
    return tensors


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
        atol = 0.0 if kind is GGMLQuantizationType.F32 else 2e-3
        torch.testing.assert_close(imported.state_dict()[name], weight, rtol=0.0, atol=atol)
        assert torch.equal(imported.state_dict()[name], others.state_dict()[name]), name
    ids = torch.tensor([tokenizer.encode(TEXTS[0]).ids])
    with torch.no_grad():
        torch.testing.assert_close(imported(ids).logits, others(ids).logits, rtol=0.0, atol=1e-5)


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


def test_files_and_folders_that_cannot_be_are_refused(
    tmp_path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "folder")
    text = tmp_path / "text.gguf"
    cut_off = write_gguf(tmp_path / "model.gguf", model, tokenizer).read_bytes()[:-1000]
    for content in (b"", b"no model at all, but a text that is long enough", cut_off):
        text.write_bytes(content)
        with pytest.raises(ConfigError, match="not a readable GGUF file"):
            import_gguf(text, tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"output = .* exists already"):
        import_gguf(text, tmp_path)


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
