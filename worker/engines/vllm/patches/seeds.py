"""Seeds of vLLM on a CPU.

If a prompt is computed in parts, vLLM samples after each part, drops the token and resets the request's generator. It
can reset only a GPU's generator; with another one the engine ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def rewind_by_state(runner: Any) -> None:
    """Resets generators by their states. Call it once in a rank, on a CPU."""
    sample, note_down = runner._sample, runner._bookkeeping_sync

    def sample_rewound(*arguments: Any, **more: Any) -> Any:
        batch = runner.input_batch
        parts = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
        generators = [batch.generators[row] for row in map(int, parts) if row in batch.generators]
        states = [generator.get_state() for generator in generators]
        sampled = sample(*arguments, **more)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return sampled

    def note_down_only(*arguments: Any, **more: Any) -> Any:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return note_down(*arguments, **more)
        finally:
            batch.generators = generators

    runner._sample, runner._bookkeeping_sync = sample_rewound, note_down_only
