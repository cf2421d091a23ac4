"""Plug-ins: parts of forgeasync that a run does not need.

A plug-in is a folder here. It imports the rooms of forgeasync through their fronts alone, has a front of its
own, and its tests are in ``tests/plugins/<name>``. Apps, benchmarks and examples import plug-ins; the core
never does, so that you can remove one without touching anything else.
"""
