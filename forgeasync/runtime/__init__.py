"""Processes and hosts of a run: Monarch actors, their start and their supervision."""

import lazy_loader

# This must be imported before Monarch.
from forgeasync.runtime import monarch_limits as monarch_limits

# __init__.pyi lists the names; each one is imported from its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
