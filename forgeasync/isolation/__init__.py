"""Sandboxes for model-written code, and contained processes that verify answers."""

import lazy_loader

# __init__.pyi lists the names; each one is imported from its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
