"""Tests of your own environments, rewards and loops: scripted agents and generators, clocks, and tiny runs.

docs/testing.md has an example of each. The package's own tests use the same names.
"""

import lazy_loader

# __init__.pyi lists the names; each one is imported from its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
