"""The bound of a demo's run."""

from __future__ import annotations

from rl_plane.cli.settings import DEMO_STEPS
from rl_plane.demo.run import DEADLINE_S, ENGINE_DEADLINE_S, deadline_s


def test_the_bound_grows_with_the_steps_beyond_the_default() -> None:
    assert deadline_s(1, "hf") == deadline_s(DEMO_STEPS, "hf") == DEADLINE_S
    assert deadline_s(10 * DEMO_STEPS, "hf") == 10 * DEADLINE_S
    assert deadline_s(2 * DEMO_STEPS, "vllm") == 2 * ENGINE_DEADLINE_S
