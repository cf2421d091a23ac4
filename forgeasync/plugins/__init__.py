"""Plug-ins: parts of forgeasync that a run does not need.

Each plug-in is a folder here with its public interface (``__init__.pyi``); its tests are in
``tests/plugins/<name>``. A plug-in imports other packages of forgeasync only through their public interfaces.
Apps, benchmarks and examples import plug-ins. The core never does: it finds the kinds that plug-ins add to a
config by their entry points in pyproject.toml, as it finds those of other packages. You can remove a plug-in
and its entry points without any other change.
"""
