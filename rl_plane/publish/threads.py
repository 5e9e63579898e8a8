"""The trainer's other threads, which read tensors by the same GPU as the thread that began them."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

T = TypeVar("T")


def on_thread(work: Callable[[], object]) -> None:
    """Runs `work` on a thread, in the caller's context: a span of the trainer's stays the current one."""
    context = contextvars.copy_context()
    there = at_callers_gpu(work)
    threading.Thread(target=lambda: context.run(there), name="rl-plane-publish", daemon=True).start()


def at_callers_gpu(work: Callable[[], T]) -> Callable[[], T]:
    """Wraps `work` for another thread, so that it uses the caller's current GPU.

    torch gathers on the current GPU, which each thread has for itself: in a new thread it is number 0 on every rank.
    """
    cuda: Any = sys.modules.get("torch.cuda")
    if not hasattr(cuda, "is_initialized") or not cuda.is_initialized():  # not imported, or still being imported
        return work
    number = cuda.current_device()

    def there() -> T:
        with ExitStack() as stack:
            with suppress(RuntimeError):  # the GPU has failed: reading there raises the error
                stack.enter_context(cuda.device(number))
            return work()

    return there
