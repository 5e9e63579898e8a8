"""The exit codes of a worker process."""

OK = 0
ERROR = 1
"""An error that a new start would meet again."""
WRONG_SETTING = 2
"""A setting is wrong, or a file that it names."""
ENGINE_DEAD = 70
ENGINE_HUNG = 71
SUPERSEDED = 72
"""Another process has taken the instance id."""
FAILED = 73
"""A background task that the worker needs has failed: a fault of the product, or of the engine's adapter."""
MODEL_CHANGED = 74
"""The model's files changed while the engine loaded them. A new process loads the new files."""
COME_BACK = (ENGINE_DEAD, ENGINE_HUNG, FAILED, MODEL_CHANGED)
"""After these a supervisor starts the process again, even if it was never ready."""

EXIT_MARGIN_S = 15.0
"""The time that leaving and closing the engine may take after the drain, before the process exits anyway."""
