"""Everything that touches TorchTitan."""

import lazy_loader

# TorchTitan's modules copy the device type on import, so this module comes before all of them.
from forgeasync.models.workarounds import titan_utils as titan_utils

# __init__.pyi lists the names; each one is imported from its module on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
