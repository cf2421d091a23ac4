"""Base classes of the config sections that plug-ins add (docs/plugins.md).

The core loads such a section by its ``kind`` and calls its methods, so that it does not depend on the
plug-in.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from forgeasync.schema import PluginSection, Problem

if TYPE_CHECKING:
    from forgeasync.config.run import RunConfig
    from forgeasync.config.sandbox import SandboxSection
    from forgeasync.environments import Environment, SourceProblems


class InstalledEnvironment(PluginSection):
    """Base class of ``environment`` sections of an installed kind."""

    runs_code: ClassVar[bool] = False
    """Whether each live episode uses a sandbox."""

    def check(self, config: "RunConfig") -> Iterator[Problem]:
        """Check the section against the rest of the config; does no I/O."""
        yield from ()

    def check_here(self, sandbox: "SandboxSection") -> Iterator[Problem]:
        """Yield conditions of this machine with which every episode would fail at its start."""
        yield from ()

    @abstractmethod
    def build(self, sandbox: "SandboxSection") -> "Environment":
        """Build the environment; ``sandbox`` configures where it runs code of the model."""


class InstalledSource(PluginSection):
    """Base class of sources of problems of an installed kind."""

    serves_people: ClassVar[bool] = False
    """Whether people submit the tasks over HTTP during the run, so that no problems are read or held out."""

    @property
    def name(self) -> str:
        """Default name of the source in metrics."""
        return self.kind

    def check(self, config: "RunConfig", field: str) -> Iterator[Problem]:
        """Check the section against the rest of the config; does no I/O.

        ``field`` is the dotted path of the section in the config, such as ``data.source``.
        """
        yield from ()

    @abstractmethod
    def problems(self, *, num_train: int, num_held_out: int, seed: int) -> "SourceProblems":
        """Read the problems and sample from them with ``seed``.

        Raises:
            ConfigError: the problems cannot be read; the error names ``data.source`` and one of its keys.
        """
