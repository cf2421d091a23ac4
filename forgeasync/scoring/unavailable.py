"""What a reward raises when nothing is wrong with it or the response, but what it needs is not there now."""


class RewardUnavailable(Exception):
    """A reward cannot score now: a server is down, or its limit of requests is used up.

    It says nothing of the response. No attempt is counted; the response is scored later.
    """

    def __init__(self, reason: str, retry_after_s: float) -> None:
        """``retry_after_s`` is when it is worth trying again, in seconds from now."""
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.reason
