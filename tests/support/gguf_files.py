"""Small GGUF files, written with the gguf package from a transformers model and tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

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

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


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
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # convert_hf_to_gguf.py, LlamaModel.permute
            num_heads = weight.shape[0] // model.config.head_dim
            halves = weight.reshape(num_heads, 2, model.config.head_dim // 2, weight.shape[1])
            weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", maxsplit=3)
            tensors[f"blk.{layer}.{_NAMES[part]}"] = weight
        else:
            tensors[_NAMES[name]] = weight
    return tensors
