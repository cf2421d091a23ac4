"""Imports reasoning-gym without matplotlib.

reasoning-gym 0.1.25 imports cellpylib 2.4.0 for its game of life, and cellpylib imports matplotlib for plots
that forgeasync does not use. This costs 25 MiB and half a second in the controller and in every process that
verifies answers. Remove this module when cellpylib imports matplotlib only to plot.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_PLOTS = (
    "matplotlib",
    "matplotlib.pyplot",
    "matplotlib.animation",
    "matplotlib.collections",
    "mpl_toolkits",
    "mpl_toolkits.mplot3d",
)
"""Modules that cellpylib imports for plots."""


class _Later(ModuleType):
    """Placeholder for a module, which is imported at the first access to an attribute."""

    def __getattr__(self, name: str) -> Any:
        _take_away()
        return getattr(importlib.import_module(self.__name__), name)


def _take_away() -> None:
    for name in _PLOTS:
        if isinstance(sys.modules.get(name), _Later):
            del sys.modules[name]


def _import_reasoning_gym() -> None:
    if not any(name in sys.modules for name in _PLOTS):
        later = {name: _Later(name) for name in _PLOTS}
        for name, module in later.items():
            package, _, own_name = name.rpartition(".")
            if package:
                setattr(later[package], own_name, module)
        # cellpylib imports Axes3D only to register it with matplotlib, which registers it itself.
        vars(later["mpl_toolkits.mplot3d"]).update(Axes3D=None, __path__=[])
        sys.modules.update(later)
    try:
        importlib.import_module("reasoning_gym")
    finally:
        # Later imports get the real modules.
        _take_away()


_import_reasoning_gym()

from reasoning_gym import create_dataset  # noqa: E402
from reasoning_gym.dataset import ProceduralDataset  # noqa: E402
from reasoning_gym.factory import DATASETS  # noqa: E402

__all__ = ["DATASETS", "ProceduralDataset", "create_dataset"]
