"""reasoning-gym is imported without what it imports for plots."""

import subprocess
import sys


def run(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return done.stdout


def test_nothing_for_plots_is_imported() -> None:
    text = """
import sys
import forgeasync.environments.reasoning_gym
import reasoning_gym
print([name for name in sys.modules if name.startswith(("matplotlib", "mpl_toolkits"))])
board = reasoning_gym.create_dataset("game_of_life", seed=0, size=1)[0]
print(board["metadata"]["source_dataset"])
print("matplotlib" in sys.modules)
"""
    assert run(text).splitlines() == ["[]", "game_of_life", "False"]


def test_plots_are_drawn_all_the_same() -> None:
    text = """
import forgeasync.environments.reasoning_gym
import cellpylib.ca_functions2d as cells
import matplotlib.pyplot as plt
from mpl_toolkits.mplot3d import Axes3D
print(cells.plt.figure is plt.figure, cells.mcoll.LineCollection.__module__, Axes3D.__name__)
plt.switch_backend("agg")
print(type(plt.figure().add_subplot(projection="3d")).__name__)
"""
    assert run(text).splitlines() == ["True matplotlib.collections Axes3D", "Axes3D"]


def test_what_was_imported_before_is_left_alone() -> None:
    text = """
import matplotlib.pyplot as plt
import forgeasync.environments.reasoning_gym
import cellpylib.ca_functions2d as cells
print(cells.plt is plt)
"""
    assert run(text) == "True\n"
