"""Imports reasoning-gym without matplotlib.

reasoning-gym 0.1.25 imports cellpylib 2.4.0 for its game of life, and cellpylib imports matplotlib for plots
that forgeasync does not use. This costs 25 MiB and half a second in the controller and in every process that
verifies answers. Remove this module when cellpylib imports matplotlib only to plot.
"""

import importlib
import sys
import warnings
from types import ModuleType

_PLOTS = (
    "matplotlib",
    "matplotlib.pyplot",
    "matplotlib.animation",
    "matplotlib.collections",
    "mpl_toolkits",
    "mpl_toolkits.mplot3d",
)
"""Modules that cellpylib imports for plots."""


def _import_reasoning_gym() -> None:
    """Import it with empty modules in place of those for plots, unless matplotlib is there already."""
    empty = {} if "matplotlib" in sys.modules else {name: ModuleType(name) for name in _PLOTS}
    if empty:
        # cellpylib imports Axes3D only to register it with matplotlib.
        vars(empty["mpl_toolkits.mplot3d"])["Axes3D"] = None
    sys.modules.update(empty)
    try:
        with warnings.catch_warnings():
            # cellpylib compares texts with "is", which Python warns about when it compiles a module.
            warnings.simplefilter("ignore", SyntaxWarning)
            importlib.import_module("reasoning_gym")
    finally:
        # Later imports get the real modules.
        for name in empty:
            del sys.modules[name]


_import_reasoning_gym()

from reasoning_gym import create_dataset  # noqa: E402
from reasoning_gym.dataset import ProceduralDataset  # noqa: E402
from reasoning_gym.factory import DATASETS  # noqa: E402

__all__ = ["DATASETS", "ProceduralDataset", "create_dataset"]
