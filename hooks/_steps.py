"""`StepCount`: where a step begins, from the positions of its buckets."""

from gradwire.compress._validation import MAX_COUNT


class StepCount:
    """Counts steps. The buckets of a step come in order, but any of them may be skipped.

    Attributes:
        ended: number of steps that have ended.
        is_open: whether a bucket of the next step has come, and its last one has not.
    """

    def __init__(self) -> None:
        self.ended, self.is_open = 0, False
        self._latest = 0  # position of the latest bucket

    def begins(self, position: int) -> bool:
        """Note a bucket; returns whether it is the first one of a step."""
        is_first, self._latest = not self.is_open or position <= self._latest, position
        return is_first

    def end(self) -> None:
        """Count a step."""
        self.ended, self.is_open = min(self.ended + 1, MAX_COUNT), False

    def number(self, position: int) -> int:
        """Number of the step to which a bucket at this position would belong."""
        return self.ended + (self.is_open and position <= self._latest)
