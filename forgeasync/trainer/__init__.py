"""Everything that touches TorchTitan."""

# TorchTitan's modules copy the device type when they are imported: this has to come before all of them.
from forgeasync.models.workarounds import flash_attention as flash_attention
from forgeasync.models.workarounds import titan_cpu as titan_cpu
