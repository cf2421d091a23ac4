"""What is wrong with a rollout that a generator made."""


class RecordError(ValueError):
    """A rollout's record contradicts its tokens or the model: it must not be trained on."""

    def __init__(self, field: str, found: str, expected: str) -> None:
        super().__init__(f"{field}: found {found}; {expected}")
        self.field = field
