"""Base classes of the sections that plug-ins add: a section is what it configures.

The core reads such a section by its ``kind``, and calls its methods where it would otherwise have to know the
plug-in (docs/plugins.md).
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
    """A section ``environment`` of a kind that a package adds."""

    runs_code: ClassVar[bool] = False
    """Whether each live episode has a box of ``sandbox``."""

    def check(self, config: "RunConfig") -> Iterator[Problem]:
        """Check the section against the rest of the config; does no I/O."""
        yield from ()

    def check_here(self, sandbox: "SandboxSection") -> Iterator[Problem]:
        """Find what would end every episode on this machine before it begins."""
        yield from ()

    @abstractmethod
    def build(self, sandbox: "SandboxSection") -> "Environment":
        """Build the environment; ``sandbox`` is where it runs what the model wrote."""


class InstalledSource(PluginSection):
    """A source of problems of a kind that a package adds."""

    serves_people: ClassVar[bool] = False
    """Whether people bring the tasks, over HTTP, so that nothing is read or held out before they come."""

    @property
    def name(self) -> str:
        """Name of the source in metrics where the config gives none."""
        return self.kind

    def check(self, config: "RunConfig", field: str) -> Iterator[Problem]:
        """Check the section against the rest of the config; does no I/O.

        ``field`` is its dotted path there, such as ``data.source``.
        """
        yield from ()

    @abstractmethod
    def problems(self, *, num_train: int, num_held_out: int, seed: int) -> "SourceProblems":
        """Read the problems, and draw from them by ``seed``.

        Raises:
            ConfigError: they cannot be read; names ``data.source`` and one of its keys.
        """
