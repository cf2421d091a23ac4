"""Verifiers, rewards, judges and process rewards, and the processes in which they score responses."""

import lazy_loader

# __init__.pyi lists the names; each one is imported from its module on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
