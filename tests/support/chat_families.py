"""Tokenizers with the special tokens of families of models, and chat templates that render as theirs do.

The tokenizer is a byte-level BPE with a few hundred merges: small, and drift between two ways to tokenize a
text shows as in a large one. The templates in ``chat_templates/`` are written for these tests; long texts in
them are those of the package renderers, whose tests compare them with the models' own templates.
"""

from functools import cache
from pathlib import Path

from renderers import glm45, llama_3, qwen3, qwen35
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CORPUS = (
    """the answer is a number and the tool returns a value of the name with the count and the ratio
def f(x): return x + 1  # set_value ping options items final true false null parameters arguments function
<parameter=name> </parameter> <function=ping> </function> {"name": "set_value", "arguments": {"count": 12}}
user assistant system tool response one two three größer 日本語 1234 5678 9012\n\n\n"""
    * 4
)

# Runs of newlines are pieces of their own, as in the tokenizers of Qwen and Llama 3.
_PIECES = r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""

_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_DEEPSEEK = (
    "end▁of▁sentence begin▁of▁sentence User Assistant tool▁calls▁begin tool▁calls▁end tool▁call▁begin "
    "tool▁call▁end tool▁sep tool▁outputs▁begin tool▁outputs▁end tool▁output▁begin tool▁output▁end"
)
_LLAMA = "eot_id begin_of_text start_header_id end_header_id end_of_text eom_id"

# The token that ends a turn comes first; special ones are left out of decoded text.
_TOKENS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "qwen3": (_CHATML, _THINK),
    "qwen3.5": (
        (*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        _THINK,
    ),
    "llama-3": (tuple(f"<|{name}|>" for name in _LLAMA.split()), ()),
    "glm-4.5": (
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek-v3": (tuple(f"<｜{name}｜>" for name in _DEEPSEEK.split()), ()),
}


def _template(family: str, header: str = "", footer: str = "") -> str:
    """A template of the folder; ``header`` and ``footer`` are the texts around the tools that it shows."""
    text = (Path(__file__).with_name("chat_templates") / f"{family}.jinja").read_text("utf-8").strip()
    shown = {"tools_header": header, "tools_footer": footer}
    return "".join(f"{{%- set {name} = {one!r} %}}" for name, one in shown.items()) + text


TEMPLATES = {
    "qwen3": _template("qwen3", qwen3._TOOLS_HEADER, qwen3._TOOLS_FOOTER),
    "qwen3.5": _template("qwen3.5", qwen35._TOOLS_HEADER, qwen35._TOOLS_FOOTER + qwen35._TOOLS_INSTRUCTIONS),
    "llama-3": _template("llama-3", llama_3._TOOLS_IN_USER_INTRO),
    "glm-4.5": _template("glm-4.5", glm45._TOOLS_HEADER, glm45._TOOLS_FOOTER),
    "deepseek-v3": _template("deepseek-v3"),
}


@cache
def _trained(family: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special, plain = _TOKENS[family]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return tokenizer


def family_tokenizer(family: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, with its chat template or another."""
    special, _ = _TOKENS[family]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_trained(family),
        eos_token=special[0],
        extra_special_tokens={f"mark_{index}": token for index, token in enumerate(special)},
    )
    fast.chat_template = template or TEMPLATES[family]
    return fast
