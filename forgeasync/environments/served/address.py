"""Where people are served: the address and the token, which stay the same when a worker is replaced."""

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forgeasync.config import ServingSection
from forgeasync.environments.sessions.server import MIN_TOKEN_CHARS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSetup:
    """What a worker needs to serve people."""

    section: ServingSection
    port: int
    """0: any that is free."""
    token: str = field(repr=False)


class ServingAddress:
    """The address of a run, and the file that says it to clients. Lives in the controller."""

    def __init__(self, section: ServingSection, file: Path, tell: Callable[[str], None]) -> None:
        """``tell`` is called with a line for people.

        Raises:
            ValueError: the token's variable is not set, or too short.
        """
        self._section = section
        self._file = file
        self._tell = tell
        self._port = section.port
        self._token = (
            secrets.token_urlsafe(32) if section.token_env is None else read_token(section.token_env)
        )

    def setup(self) -> ServingSetup:
        """Return what the next worker is to serve with."""
        return ServingSetup(section=self._section, port=self._port, token=self._token)

    def opened(self, url: str, port: int) -> None:
        """A worker listens: later ones get the same port. Writes the file, readable for its owner only."""
        self._port = port
        token = (
            {"token": self._token}
            if self._section.token_env is None
            else {"token_env": self._section.token_env}
        )
        text = json.dumps({"url": url, **token}, indent=1) + "\n"
        new = self._file.with_name(f".{self._file.name}.new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(self._file)
        whose = "its token is in" if self._section.token_env is None else "the address is in"
        self._tell(f"serving people: POST {url}/sessions; {whose} {self._file}")


def read_token(variable: str) -> str:
    """Return the token in an environment variable.

    Raises:
        ValueError: it is not set, or too short.
    """
    token = os.environ.get(variable, "")
    if len(token) < MIN_TOKEN_CHARS or not token.isascii():
        what = f"has {len(token)} characters" if token else "is not set"
        raise ValueError(
            f"environment variable {variable} {what}; must hold a token of at least {MIN_TOKEN_CHARS} ASCII "
            "characters"
        )
    return token
