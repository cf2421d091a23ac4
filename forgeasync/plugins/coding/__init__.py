"""Plug-in: a model changes a repository in a sandbox, and hidden tests judge its changes (docs/coding.md).

The entry points in pyproject.toml add the kind ``coding`` to ``environment`` and to task sources.
"""

import lazy_loader

# __init__.pyi lists the names; each one is imported from its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
