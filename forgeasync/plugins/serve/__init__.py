"""Plug-in: people talk to the newest policy while it trains on what they say of it (docs/serving.md).

The entry points in pyproject.toml add the kind ``served`` to ``environment`` and to sources of problems.
"""

import lazy_loader

# __init__.pyi lists the names; each one is imported from its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
