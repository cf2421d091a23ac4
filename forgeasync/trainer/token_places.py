"""Where the tokens of a response lie in its text.

Shape suffixes: P prompt tokens, T tokens of the response.
"""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

INVALID_PREFIX = "Invalid prefix encountered"
"""How the error of tokenizers begins, as in ``vllm.v1.engine.detokenizer``."""


class TokenPlaces:
    """Decodes responses as the generator does, a token at a time; nothing is ever tokenized again."""

    def __init__(self, folder: Path | None) -> None:
        """``folder`` holds the tokenizer; it is read when the first response has to be decoded."""
        self._folder = folder
        self._tokenizer: Tokenizer | None = None

    def starts(self, prompt_ids_P: np.ndarray, response_ids_T: np.ndarray) -> np.ndarray:
        """The characters of the text at which the tokens begin, int64 [T].

        The tokens that a character's bytes are spread over all begin where that character does, and so does a
        token whose first bytes end one character while its last ones begin another. Tokens that add no text,
        special ones among them, begin where the next text does.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load()
        # As vLLM does: the prompt's tokens decide about a space before the first word.
        stream = DecodeStream(ids=prompt_ids_P.tolist(), skip_special_tokens=True)
        starts_T = np.zeros(len(response_ids_T), np.int64)
        num_characters = 0
        for index, token in enumerate(response_ids_T.tolist()):
            starts_T[index] = num_characters
            try:
                text = stream.step(self._tokenizer, token)
            except Exception as error:
                if not str(error).startswith(INVALID_PREFIX):
                    raise
                # Bytes that are no text can break a stream; vLLM begins another one, too.
                stream = DecodeStream(skip_special_tokens=True)
                text = stream.step(self._tokenizer, token)
            num_characters += len(text or "")
        return starts_T

    def _load(self) -> Tokenizer:
        # transformers takes a second to import, for step rewards only.
        from transformers import AutoTokenizer

        assert self._folder is not None, "a trainer of rollouts is told where the tokenizer is"
        return AutoTokenizer.from_pretrained(self._folder).backend_tokenizer
