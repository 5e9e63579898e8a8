"""The requests of pooling models, for engines that take token ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from rl_plane.errors import EngineFailed
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from worker.engines.capabilities import CanPool
from worker.engines.common.generating import Generating
from worker.engines.common.pieces import Piece
from worker.engines.common.pooling_head import PoolingHead, read_head
from worker.engines.common.spans import Label

NO_LOGPROBS = "a pooling model has no logprobs of tokens: the canary leaves it out"
NO_ADAPTERS = "adapters of pooling models are not served here"
NO_POOLING_LORA = {"prepare_update:lora": NO_ADAPTERS, "update_weights:lora": NO_ADAPTERS}


class PooledRequests(Generating, CanPool):
    """Implements `pool`. The engine computes the raw numbers in `_raw`."""

    _head: PoolingHead | None = None

    @property
    def head(self) -> PoolingHead:
        if self._head is None:
            raise EngineFailed("the engine serves no pooling model")
        return self._head

    def _read_head(self) -> None:
        """Blocks. Does nothing for a model that generates."""
        task = self._options.task
        self._head = None if task == "generate" else read_head(self._options.model, task)

    def pool(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        return self._deltas(request, self._pooled)

    async def _pooled(self, request: GenerateRequest, prompt: list[int]) -> AsyncGenerator[Piece, None]:
        assert request.pooling is not None, "`pool` gets no other"
        self.head.check(request.pooling)
        found = await self._raw(request, prompt)
        if found is None:
            yield Piece(finish_reason="abort")
            return
        raw, label = found
        yield Piece(labels=[label], pooled=self.head.finish(raw, request.pooling), finish_reason="stop")

    @abstractmethod
    async def _raw(self, request: GenerateRequest, prompt: list[int]) -> tuple[Any, Label] | None:
        """The logits or the pooled hidden state of the prompt, and the weights that computed all of it. None: the
        request was aborted. A cancelled call aborts it in the engine."""
