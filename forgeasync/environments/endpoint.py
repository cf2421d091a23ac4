"""Which model behind which endpoint is asked for turns, and with which key."""

import os
from dataclasses import dataclass

NO_KEY = "none"
"""What is sent to an endpoint that wants no key: the SDK wants one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointModel:
    """A model behind an OpenAI-compatible endpoint."""

    base_url: str
    """URL up to ``/v1``, such as ``http://localhost:8000/v1``."""
    model: str
    """The model's name there."""
    api_key_variable: str | None = None
    """Name of the environment variable with the key; None: no key is sent. The key itself travels nowhere."""
    max_retries: int = 5
    """Times that the SDK repeats a request that failed for a reason that may pass, such as a rate limit."""

    def api_key(self) -> str:
        """Read the key.

        Raises:
            ValueError: the variable is not set.
        """
        if self.api_key_variable is None:
            return NO_KEY
        key = os.environ.get(self.api_key_variable)
        if not key:
            raise ValueError(f"environment variable {self.api_key_variable} is not set; must hold the key")
        return key
