"""Real vLLM that takes adapters of some modules only (`lora_target_modules`)."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.engines("vllm"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::(torch|vllm|transformers|multiprocessing)"),  # theirs, not ours
]

from rl_plane.errors import InvalidWeights  # noqa: E402
from tests.support.engine_kinds import VLLM  # noqa: E402
from tests.support.engine_models import is_of  # noqa: E402
from tests.support.engine_runs import ask, load_adapter, receive, reception, run  # noqa: E402
from tests.support.zygote import children_forked  # noqa: E402
from worker.testing.tiny_adapter import make_tiny_adapter  # noqa: E402
from worker.testing.tiny_model import make_tiny_model  # noqa: E402


async def test_an_adapter_of_a_module_that_vllm_was_not_started_for_is_refused(tmp_path: Path) -> None:
    """vLLM would drop this part of the adapter. It has the query, the key and the value in one layer, and takes all of
    them where it takes one."""
    model = make_tiny_model(tmp_path / "model", 1, "bfloat16")
    with children_forked("vllm"):
        engine = VLLM.build(VLLM.options(model, lora_target_modules="q_proj"))
        await engine.start()
        try:
            whole = make_tiny_adapter(model, tmp_path / "whole", seed=1, targets=("q_proj", "v_proj"), std=0.3)
            await load_adapter(engine, "x", whole)
            assert is_of(await run(engine, ask([5, 6, 7], adapter="x", logprobs=True)), model, whole)
            part = make_tiny_adapter(model, tmp_path / "part", seed=1, targets=("q_proj", "o_proj"))
            with pytest.raises(InvalidWeights, match="o_proj") as caught:
                await receive(engine, reception(part, kind="lora"))
            assert caught.value.facts["field"] == "adapter_config.target_modules"
            assert caught.value.facts["fix"] == "target k_proj, q_proj, v_proj only"
        finally:
            await engine.close()
