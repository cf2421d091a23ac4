"""Plug-ins: parts of forgeasync that a run does not need.

A plug-in is a folder here. It imports the rooms of forgeasync through their fronts alone, has a front of its
own, and its tests are in ``tests/plugins/<name>``. Apps, benchmarks and examples import plug-ins; the core
never does: it finds the kinds that plug-ins add to a config by their entry points in pyproject.toml, like
those of other packages. You can remove a plug-in with its entry points and touch nothing else.
"""
