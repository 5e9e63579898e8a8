"""The clocks of one simulated process: no two machines agree on the time, and none can see how far it is off."""

from __future__ import annotations

UNIX_S = 1.7e9
"""The Unix time at which virtual time is 0."""


class Clock:
    """`now`, everywhere: the virtual time of the loop."""

    def __init__(self) -> None:
        self.offset = 0.0
        """The start of the monotonic clock: machines count from their own starts."""
        self.rate = 1.0
        """Monotonic seconds in a true second."""
        self.skew_s = 0.0
        """The seconds by which the wall clock is ahead."""
        self.stood_s = 0.0
        """The true seconds for which the monotonic clock stood still, because the virtual machine was paused."""

    def monotonic(self, now: float) -> float:
        return self.offset + self.rate * (now - self.stood_s)

    def at(self, monotonic: float) -> float:
        """The virtual time at which the monotonic clock shows this, if it does not stand still until then."""
        return (monotonic - self.offset) / self.rate + self.stood_s

    @property
    def is_true(self) -> bool:
        return self.offset == self.stood_s == 0.0 and self.rate == 1.0

    def wall(self, now: float) -> float:
        return UNIX_S + now + self.skew_s
