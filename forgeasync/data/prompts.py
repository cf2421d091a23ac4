"""From a problem's text to the token ids that a generator is prompted with."""

import numpy as np
from transformers import PreTrainedTokenizerFast

from forgeasync.data.task import Task


class PromptEncoder:
    """Encodes prompts as they are, or as one user turn of the tokenizer's chat template.

    Raises ValueError if ``chat_template`` is asked for and the tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, chat_template: bool) -> None:
        if chat_template and tokenizer.chat_template is None:
            raise ValueError(
                f"data.chat_template is true, but the tokenizer of {tokenizer.name_or_path!r} has no template"
            )
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def encode(self, prompt: str) -> np.ndarray:
        """Token ids of ``prompt``, int32, up to where the response begins."""
        if self._chat_template:
            # Rendered first and tokenized after: the template writes its special tokens itself.
            prompt = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        return np.asarray(self._tokenizer(prompt, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def check_length(self, task: Task, *, max_context_length: int, max_response_tokens: int) -> None:
        """Raise ValueError naming ``task`` unless it leaves room for a full response (lengths in tokens)."""
        num_tokens = len(self.encode(task.prompt))
        limit = max_context_length - max_response_tokens
        if num_tokens == 0:
            raise ValueError(f"the prompt of task {task.task_id!r} has no tokens")
        if num_tokens > limit:
            raise ValueError(
                f"the prompt of task {task.task_id!r} has {num_tokens} tokens, but model.max_context_length "
                f"{max_context_length} less sampling.max_response_tokens {max_response_tokens} leaves {limit}"
            )
