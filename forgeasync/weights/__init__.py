"""Versions of the weights, on their way from the trainer to the generators."""

import os

# torchstore needs large messages and sets this itself on import, with a warning on the terminal if it has to.
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")
