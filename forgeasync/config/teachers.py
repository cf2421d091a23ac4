"""The ``teachers`` section: models that say how likely they find what the policy has sampled."""

from pydantic import Field

from forgeasync.config.generator import GeneratorSection
from forgeasync.schema.section import Count, Section


class TeacherSection(Section):
    """A model whose log-probabilities of sampled tokens terms of the loss use (``algorithm.terms``).

    Its engines are those of a generator that does not sample: they are watched and replaced alike.
    """

    model_path: str = Field(min_length=1)
    """Hugging Face folder or hub id of the teacher; it has to have the policy's tokenizer."""
    sources: tuple[str, ...] = ()
    """Names of the data sources whose rollouts it sees; empty: all. Every source has exactly one teacher."""
    prompt: str | None = None
    """What the teacher reads before a response, where that is not what the policy read: a template in which
    ``$prompt`` is the task's prompt, ``$answer`` its reference and ``$column`` a column of its record, such
    as a hint or a demonstration. The response's tokens stay the same. null: the policy's own prompt."""
    max_context_length: Count | None = None
    """Most tokens that it reads, and one more; null: ``model.max_context_length`` + 1."""
    engine: GeneratorSection = GeneratorSection(keep_in_flight=False)
    """Its engines: the same settings as ``generator``."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """Attempts at a group; after this many failures it is given up (``dropped/unscored``). What was lost with
    an engine counts too."""
