"""A loop that was held up. Who watches others for silence counts the time in which it did not look itself against
nobody."""


class Pauses:
    def __init__(self, usual: float, now: float) -> None:
        """`usual`: seconds between two looks that are no pause."""
        self.usual = usual
        self.looked_at = now

    def look(self, now: float) -> float:
        """The seconds by which this look comes too late."""
        late = max(now - self.looked_at - self.usual, 0.0)
        self.looked_at = now
        return late
