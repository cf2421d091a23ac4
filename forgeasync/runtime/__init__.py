"""Processes and hosts of a run: Monarch actors, their supervision, and how they are started."""

import lazy_loader

# Before anything imports Monarch.
from forgeasync.runtime import monarch_limits as monarch_limits

# __init__.pyi lists the names; each one is imported from its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
