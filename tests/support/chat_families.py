"""Tokenizers with the special tokens of families of models, and chat templates that render as theirs do.

The tokenizer is a byte-level BPE with a few hundred merges: small, and drift between two ways to tokenize a
text shows as in a large one. The templates are written for these tests; the long texts in them are those of
the package renderers, whose tests compare them with the models' own templates.
"""

from functools import cache

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
_BAR, _LOW = "｜", "▁"


def _deepseek(name: str) -> str:
    return f"<{_BAR}{name.replace(' ', _LOW)}{_BAR}>"


_DEEPSEEK = tuple(
    _deepseek(name)
    for name in (
        "end of sentence",
        "begin of sentence",
        "User",
        "Assistant",
        "tool calls begin",
        "tool calls end",
        "tool call begin",
        "tool call end",
        "tool sep",
        "tool outputs begin",
        "tool outputs end",
        "tool output begin",
        "tool output end",
    )
)

# The token that ends a turn comes first; special ones are left out of decoded text.
_TOKENS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "qwen3": (_CHATML, _THINK),
    "qwen3.5": (
        (*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        _THINK,
    ),
    "llama-3": (
        tuple(
            f"<|{name}|>"
            for name in "eot_id begin_of_text start_header_id end_header_id end_of_text eom_id".split()
        ),
        (),
    ),
    "glm-4.5": (
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek-v3": (_DEEPSEEK, ()),
}

_LAST_QUERY = """
{%- set ns = namespace(open=true, last=messages | length - 1) %}
{%- for m in messages[::-1] %}{% if ns.open and m.role == 'user' %}
{%- set ns.open = false %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"""

_CHATML_TOOL_RESULT = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"""

QWEN3 = (
    """{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- tools_header }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- tools_footer + '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}"""
    + _LAST_QUERY
    + """
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}{% set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or content %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}"""
    + _CHATML_TOOL_RESULT
    + """{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
)

QWEN35 = (
    """{%- if tools %}{{ '<|im_start|>system\n' + tools_header }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ tools_footer }}
{%- if messages[0].role == 'system' %}{{ '\n\n' + (messages[0].content | trim) }}{% endif %}
{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + (messages[0].content | trim) + '<|im_end|>\n' }}{% endif %}"""
    + _LAST_QUERY
    + """
{%- for m in messages %}{% set content = m.content | trim %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last %}{{ '<think>\n' + (thought | trim) + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first %}{{ '\n' }}{% elif content %}{{ '\n\n' }}{% endif %}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\n' }}
{%- if value is mapping or (value is sequence and value is not string) %}{{ value | tojson }}
{%- else %}{{ value | string }}{% endif %}{{ '\n</parameter>\n' }}{% endfor %}
{{- '</function>\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}"""
    + _CHATML_TOOL_RESULT
    + """{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"""
)

LLAMA3 = """
{%- macro header(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{%- if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- set rest = messages %}{% set told = '' %}
{%- if messages[0].role == 'system' %}{% set told = messages[0].content | trim %}
{%- set rest = messages[1:] %}{% endif %}
{{- '<|begin_of_text|>' + header('system') + ('Environment: ipython\n' if tools else '') }}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' + told + '<|eot_id|>' }}
{%- for m in rest %}
{%- if m.role == 'tool' %}{{ header('ipython') + (m.content | tojson) }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at once') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- header('assistant') + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{ header(m.role) }}
{%- if loop.first and tools %}{{ tools_header }}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}{% endif %}
{{- m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""

GLM45 = """[gMASK]<sop>
{%- if tools %}{{ '<|system|>' + tools_header }}
{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{{ tools_footer }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '<|system|>\n' + m.content }}
{%- elif m.role == 'user' %}{{ '<|user|>\n' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>\n' }}
{%- if loop.index0 > ns.last and m.reasoning_content %}
{{- '<think>' + (m.reasoning_content | trim) + '</think>' }}
{%- else %}{{ '<think></think>' }}{% endif %}
{%- if m.content | trim %}{{ '\n' + (m.content | trim) }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if not (m.content | trim) or loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments | items %}{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
{{- value if value is string else (value | tojson) }}{{ '</arg_value>\n' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- else %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

DEEPSEEK_V3 = """{{- '<BEGIN>' }}
{%- for m in messages %}{% set follows = not loop.first and messages[loop.index0 - 1].role == 'tool' %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<USER>' + m.content }}
{%- elif m.role == 'assistant' %}{{ ('' if follows else '<ASSISTANT>') + m.content }}
{%- if m.tool_calls %}{{ '<CALLS>' }}{% for call in m.tool_calls %}
{{- '<CALL>function<SEP>' + call.function.name + '\n```json\n' }}
{{- (call.function.arguments | tojson) + '\n```</CALL>' }}{% endfor %}{{ '</CALLS>' }}{% endif %}
{{- '<EOS>' }}
{%- else %}{{ ('' if follows else '<OUTPUTS>') + '<OUTPUT>' + m.content + '</OUTPUT>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '</OUTPUTS>' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<ASSISTANT>' }}{% endif %}"""
for _mark, _name in {
    "<BEGIN>": "begin of sentence",
    "<EOS>": "end of sentence",
    "<USER>": "User",
    "<ASSISTANT>": "Assistant",
    "<CALLS>": "tool calls begin",
    "</CALLS>": "tool calls end",
    "<CALL>": "tool call begin",
    "</CALL>": "tool call end",
    "<SEP>": "tool sep",
    "<OUTPUTS>": "tool outputs begin",
    "</OUTPUTS>": "tool outputs end",
    "<OUTPUT>": "tool output begin",
    "</OUTPUT>": "tool output end",
}.items():
    DEEPSEEK_V3 = DEEPSEEK_V3.replace(_mark, _deepseek(_name))


def _with_texts(template: str, header: str, footer: str = "") -> str:
    quoted = (
        f"{{%- set {name} = {text!r} %}}"
        for name, text in (("tools_header", header), ("tools_footer", footer))
    )
    return "".join(quoted) + template


TEMPLATES = {
    "qwen3": _with_texts(QWEN3, qwen3._TOOLS_HEADER, qwen3._TOOLS_FOOTER),
    "qwen3.5": _with_texts(QWEN35, qwen35._TOOLS_HEADER, qwen35._TOOLS_FOOTER + qwen35._TOOLS_INSTRUCTIONS),
    "llama-3": _with_texts(LLAMA3, llama_3._TOOLS_IN_USER_INTRO),
    "glm-4.5": _with_texts(GLM45, glm45._TOOLS_HEADER, glm45._TOOLS_FOOTER),
    "deepseek-v3": DEEPSEEK_V3,
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
