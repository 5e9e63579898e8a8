"""With what a worker process ends."""

OK = 0
ENGINE_DEAD = 70
ENGINE_HUNG = 71
SUPERSEDED = 72
"""Another process has taken the instance id."""
FAILED = 73
"""A part that the worker can't do without has failed: a fault of ours, or of the adapter's."""
