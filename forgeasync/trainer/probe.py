"""Which rows the mismatch without replay is measured on."""


class Probe:
    """Picks a share of rows, evenly spread, the same ones on every rank."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.owed = 0.0
        """All that its choices depend on."""

    def is_due(self) -> bool:
        """Whether the next row is one of them."""
        self.owed += self._share
        if self.owed < 1.0:
            return False
        self.owed -= 1.0
        return True
