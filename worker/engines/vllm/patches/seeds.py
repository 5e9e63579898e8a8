"""Seeds of vLLM on a CPU: of a prompt that is computed in parts vLLM samples after each part, drops the token and takes
the request's generator back. It can do that with a GPU's generator only; with another one the engine ends."""

from __future__ import annotations

from typing import Any

import numpy as np


def rewind_by_state(runner: Any) -> None:
    """In one rank, once, on a CPU: generators are taken back by their states."""
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
