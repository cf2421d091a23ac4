"""The tokenizer that a GGUF file carries, as a Hugging Face one.

transformers 5.19 reads it too, but does not know how SmolLM's texts are split before merging: every digit by
itself, and spaces and line ends before a digit apart from it.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forgeasync.data.gguf_model import GgufModel

_CONTROL = 3
"""llama.cpp's token type of special tokens."""

_NORMAL = 1


def _splits(name: str) -> pre_tokenizers.PreTokenizer | None:
    """How a text is cut before merges, by llama.cpp's name for it (llama-vocab.cpp)."""
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return None


def read_tokenizer(model: GgufModel) -> PreTrainedTokenizerFast:
    """Vocabulary, merges, special tokens and chat template of a byte-level BPE.

    Raises:
        ConfigError: another kind of tokenizer, or one whose texts are split in a way not known here.
    """
    split = _check(model)
    tokens = model.texts("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in model.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    kinds = model.value("tokenizer.ggml.token_type")
    assert isinstance(kinds, list)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[model.integer("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[model.integer("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[model.integer("tokenizer.ggml.padding_token_id")],
        unk_token=tokens[model.integer("tokenizer.ggml.unknown_token_id")],
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    if model.has("tokenizer.chat_template"):
        fast.chat_template = model.text("tokenizer.chat_template")
    return fast


def _check(model: GgufModel) -> pre_tokenizers.PreTokenizer:
    kind, splitting = model.text("tokenizer.ggml.model"), model.text("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise model.error(f"has tokenizer.ggml.model {kind!r}; only 'gpt2' (byte-level BPE) is supported")
    split = _splits(splitting)
    if split is None:
        raise model.error(f"has tokenizer.ggml.pre {splitting!r}; only 'smollm' is supported")
    for name in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"):
        if model.has(name) and model.value(name) is not False:
            raise model.error(f"has {name} = {model.value(name)!r}; only False is supported")
    kinds = model.value("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or not set(kinds) <= {_NORMAL, _CONTROL}:
        raise model.error("has tokens that are neither normal (type 1) nor control tokens (type 3)")
    return split
