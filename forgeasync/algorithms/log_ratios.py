"""Differences of log-probabilities whose exp() stays a number.

Shape suffix: T packed tokens.
"""

import torch

MAX_LOG_RATIO = 20.0
"""Largest exponent of a ratio: e^20 is beyond every sensible cap. float32 has no exp() of more than 88, and a
product over thousands of tokens reaches that."""


def capped(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """min(log ratio, ``MAX_LOG_RATIO``), with the gradient of the log ratio itself.

    exp() of it and that gradient are the ratio's own up to e^20 and e^20 beyond. Infinity would become NaN
    wherever it meets a 0: an advantage of 0, or the gradient of what a clip holds back.
    """
    excess_T = (log_ratio_T.detach() - MAX_LOG_RATIO).clamp(min=0.0)
    return log_ratio_T - excess_T
