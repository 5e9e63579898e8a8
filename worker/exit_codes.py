"""With what a worker process ends."""

OK = 0
ENGINE_DEAD = 70
ENGINE_HUNG = 71
SUPERSEDED = 72
"""Another process has taken the instance id."""
FAILED = 73
"""A part that the worker can't do without has failed: a fault of ours, or of the adapter's."""
MODEL_CHANGED = 74
"""While its engine loaded it: the next process loads what is there by then."""
COME_BACK = (ENGINE_DEAD, ENGINE_HUNG, FAILED, MODEL_CHANGED)
"""After these the same process, started anew, may fare better, also one that was never ready."""
