"""Plug-in: serves the newest policy to people, and trains it on their feedback (docs/serving.md).

The entry points in pyproject.toml add the kind ``served`` to ``environment`` and to task sources.
"""

import lazy_loader

# __init__.pyi lists the names; each one is imported from its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
