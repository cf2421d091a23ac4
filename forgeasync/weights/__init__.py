"""Versions of the weights, and their transfer from the trainer to the generators."""

import os

import lazy_loader

# torchstore needs large messages. It sets this itself on import, with a warning on the terminal if it is
# unset.
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")

# __init__.pyi lists the names; each one is imported from its module on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
