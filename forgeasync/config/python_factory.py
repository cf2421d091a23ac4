"""Finds a user's own code by its dotted name."""

import importlib
from collections.abc import Callable


def load_factory(path: str) -> Callable[..., object]:
    """The callable at ``package.module.name``; imports the module.

    Raises:
        ValueError: there is no such thing, or it cannot be called; says which part is wrong.
    """
    module_name, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError("must read package.module.name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # Whatever the user's module raises while it is imported is for the user to see.
        raise ValueError(
            f"module {module_name!r} cannot be imported ({type(error).__name__}: {error}); it must be "
            "installed or in a folder of PYTHONPATH"
        ) from error
    if name not in vars(module):
        raise ValueError(f"module {module_name!r} has no {name!r}")
    factory = vars(module)[name]
    if not callable(factory):
        raise ValueError(f"is a {type(factory).__name__}; must be a function that returns the loss")
    return factory
