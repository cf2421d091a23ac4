"""The section on agents of an environment that has several."""

from forgeasync.schema import Section


class AgentSection(Section):
    """One agent of an environment."""

    trainable: bool = True
    """Train on what this agent samples. It is compared with the same agent in the other episodes of a group.
    false: it is sampled from the same weights and not trained on, as a judge may be."""
