"""Everything that touches TorchTitan."""

import lazy_loader

# TorchTitan's modules copy the device type on import, so these two modules come before all of them.
from forgeasync.models.workarounds import flash_attention as flash_attention
from forgeasync.models.workarounds import titan_cpu as titan_cpu

# __init__.pyi lists the names; each one is imported from its module on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
