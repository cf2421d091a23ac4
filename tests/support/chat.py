"""A tokenizer of single characters with chat templates as models have them, and a model that is scripted."""

import string
from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forgeasync.environments import TurnRequest
from forgeasync.rollouts import FinishReason, SampledTurn

START, END = "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPPING = CHATML.replace("m['content']", "(m['content'] | trim)")
"""As Llama 3 does."""
SPACED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + '<|im_end|>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
"""As Mistral does: no generation prompt, but a space before a turn."""
FORGETFUL = CHATML.replace(
    "m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])"
)
"""As Qwen3 does: without the reasoning of earlier turns."""
LAST_ONLY = CHATML.replace("messages %}", "messages[-2:] %}")
NUMBERED = CHATML.replace("m['role']", "m['role'] + (messages | length | string)")
PICKY = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


def make_tokenizer(template: str | None, *, newline: bool = True) -> PreTrainedTokenizerFast:
    """Characters and the two special tokens of ChatML."""
    characters = sorted(set(string.printable) - (set() if newline else {"\n"}))
    vocabulary = {token: index for index, token in enumerate(["<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token=END)
    fast.chat_template = template
    return fast


class ScriptedModel:
    """Says given texts one after the other, and keeps each episode's tokens as a generator does."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, cut: bool = False
    ) -> None:
        """With ``cut`` turns end for their length, otherwise with the end token."""
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._cut = cut
        self.paths: list[list[int]] = []
        """All tokens up to and including each turn."""
        self.requests: list[TurnRequest] = []

    @property
    def ids(self) -> list[int]:
        """The tokens of the newest turn's path."""
        return self.paths[-1]

    @property
    def max_tokens(self) -> list[int]:
        """The bounds that the turns were asked for with."""
        return [request.max_tokens for request in self.requests]

    async def __call__(self, request: TurnRequest) -> SampledTurn | None:
        assert request.given_ids.dtype == np.int32
        self.requests.append(request)
        before = [] if request.after is None else self.paths[request.after]
        return self.say([*before, *request.given_ids.tolist()])

    def say(self, before: Sequence[int] = ()) -> SampledTurn:
        text = self._texts.pop(0)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not self._cut:
            ids.append(self._tokenizer.eos_token_id)
        self.paths.append([*before, *ids])
        return SampledTurn(
            turn=len(self.paths) - 1,
            ids_T=np.asarray(ids, np.int32),
            text=text,
            finish_reason=FinishReason.LENGTH if self._cut else FinishReason.STOP,
            first_version=0,
            version=0,
        )
