"""The tasks of workers, and the reply of a pooling model: one vector for one input."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Task = Literal["generate", "classify", "embed"]
"""The task of a worker: its model makes tokens, scores of labels (a reward model), or embeddings."""
PoolingTask = Literal["classify", "embed"]

TASKS: dict[Task, str] = {
    "generate": "generates tokens",
    "classify": "gives scores of labels (a reward model)",
    "embed": "makes embeddings",
}

MAX_DIMENSION = 1 << 16
"""Numbers of one vector. It travels in one message, of which 4 bytes each are a quarter."""
MAX_PAIR_CHARS = 1 << 20
"""Characters of the second text of a pair."""


class Pooling(BaseModel):
    """The part of a request that asks for one vector instead of tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: PoolingTask
    activation: bool = True
    """`classify`: turn the logits into probabilities, as the model's config says. `embed`: scale the vector to length
    1. False: the numbers as the model computes them."""
    dimensions: int | None = Field(None, ge=1, le=MAX_DIMENSION)
    """`embed`: keep only the first numbers of the vector, for a model that was trained for that (Matryoshka)."""
    text_pair: str | None = Field(None, max_length=MAX_PAIR_CHARS)
    """A second text: the tokenizer joins it with `prompt` to one input."""


def packed(vector: Sequence[float]) -> bytes:
    """A vector as it travels: float32, little-endian."""
    return struct.pack(f"<{len(vector)}f", *vector)


def unpacked(data: bytes) -> list[float]:
    """Reads the numbers of a packed vector. Raises ValueError for anything else."""
    if not data or len(data) % 4 or len(data) > 4 * MAX_DIMENSION:
        raise ValueError(f"{len(data)} bytes are no vector of 1 to {MAX_DIMENSION} numbers")
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def task_field(task: Task) -> str:
    """The name of a task among the fields of a request that a worker may lack."""
    return f"task.{task}"


def lacking_tasks(served: Task) -> dict[str, str]:
    """The capabilities that a worker of one task lacks: the other tasks."""
    return {
        f"generate:{task_field(task)}": f"this worker {TASKS[served]} (--task {served})"
        for task in TASKS
        if task != served
    }
