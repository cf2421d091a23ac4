"""Predicts the speed of a run with a discrete-event simulation that is based on measured service times.

``profile`` defines the service times and their file, ``from_run`` derives them from a run, ``stated_profile``
from a data sheet. ``run`` simulates a run with the real rules of buffer, routing, scoring, payloads and
weights. ``what_if`` simulates changes, and splits of GPUs. See docs/simulation.md and docs/profiling.md.
"""

import lazy_loader

# __init__.pyi lists the names; each one is imported from its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
