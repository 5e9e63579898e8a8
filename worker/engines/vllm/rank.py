"""The extension of vLLM's worker class (`worker_extension_cls`): the agent of a rank, which maps what the host agent
has staged, and the work that must run on vLLM's own thread, between two steps. `collective_rpc` calls it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_plane.errors import EngineFailed, PlaneError
from worker.engines.capabilities import CheckScope
from worker.engines.vllm.dtypes import dtypes_of_load
from worker.engines.vllm.here import Here
from worker.engines.vllm.holder import VllmHolder
from worker.engines.vllm.lockstep import keep_adapters
from worker.engines.vllm.logits import look_before_sampling
from worker.engines.vllm.lora_requests import lora_request
from worker.engines.vllm.prompt_logprobs import score_prompts_by_token
from worker.receive.rank_agents.agent_server import AgentServer


class RankExtension:
    """Its names begin with `rl_plane_`: vLLM refuses names that its own class has."""

    model_runner: Any
    vllm_config: Any
    rank: int

    def rl_plane_start(self) -> dict[str, Any]:
        def start() -> None:
            here = Here.read()
            # At each reload, vLLM warns of tables that are in no checkpoint.
            logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
            directory, number = Path(here.directory), _number(self)
            writes = number == here.first_rank
            holder = VllmHolder(Path(here.model), directory, self.model_runner, writes, dtypes_of_load())
            self.rl_plane_holder = holder
            methods = holder.agent_methods(directory, number) | {
                "keep_adapter": lambda body, cancelled: holder.keep_adapter(body["staging"], body["files"]),
                "drop_adapter": lambda body, cancelled: holder.drop_adapter(body["files"]),
            }
            keep_adapters(self.model_runner)
            # With the second model runner the adapter refuses such requests.
            if self.model_runner.lora_config and not self.model_runner.vllm_config.use_v2_model_runner:
                score_prompts_by_token(self.model_runner)
            if self.model_runner.device.type == "cpu":
                from worker.engines.vllm.patches.seeds import rewind_by_state

                rewind_by_state(self.model_runner)
            look_before_sampling(self.model_runner)
            AgentServer.of_rank(directory, number, methods).start()

        return _outcome(start)

    def rl_plane_ping(self) -> int:
        return os.getpid()

    def rl_plane_swap(self) -> dict[str, Any]:
        """Swaps in the taken weights."""
        return _outcome(lambda: {"copied": self.rl_plane_holder.swap()})

    # These replace vLLM's own calls for adapters. If one of those raises in a rank, vLLM takes the answers of the later
    # ranks for answers to the next call.

    def rl_plane_add_lora(self, number: int, files: str) -> dict[str, Any]:
        """`files`: the name of the directory of the adapter's files."""

        def add() -> None:
            path = str(self.rl_plane_holder.path_of_adapter(files))
            if not self.model_runner.add_lora(lora_request(number, path, anew=True)):
                raise EngineFailed("vLLM did not load the adapter")

        return _outcome(add)

    def rl_plane_remove_lora(self, number: int) -> dict[str, Any]:
        def remove() -> None:
            if not self.model_runner.remove_lora(number):
                raise EngineFailed("vLLM did not remove the adapter: it has none of this number")

        return _outcome(remove)

    def rl_plane_check(self, action: str, scope: dict[str, Any]) -> dict[str, Any]:
        return _outcome(lambda: self.rl_plane_holder.checks.row(action, CheckScope(**scope)))

    def rl_plane_reset(self) -> dict[str, Any]:
        return _outcome(lambda: self.rl_plane_holder.reset())


def _number(worker: Any) -> int:
    """The number of this rank among the ranks of all replicas."""
    parallel = worker.vllm_config.parallel_config
    return int(parallel.data_parallel_index * parallel.world_size + worker.rank)


def _outcome(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Returns an error as `error`: a raised one would reach the adapter without its type, or end the engine."""
    try:
        return work() or {}
    except PlaneError as error:
        return {"error": error.to_wire()}
    except Exception as error:
        return {"error": EngineFailed(f"{type(error).__name__}: {error}").to_wire()}
