"""Capabilities of engines beyond `EngineAdapter`: a protocol for each.

An adapter has a capability if it has the protocol's methods. The worker answers the ops of every other capability with
`unsupported`, and lists them in `describe`. An adapter that has the methods, but can't do it as it was started, names
the op in `EngineInfo.lacks` and raises `Unsupported` with the same reason.

The capability to run on several hosts is `SpansHosts` in `worker/nodes/spans_hosts.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from rl_plane.errors import Unsupported
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.pooling import lacking_tasks
from rl_plane.protocol.versions import WeightVersion
from rl_plane.protocol.worker_ops import EngineLoadReply, ParsedToolCalls, Tokenize
from worker.engines.base import LACKING, EngineAdapter, EngineInfo

CheckAction = Literal["checksum", "snapshot", "compare", "reset_tensors"]

Capability = TypeVar("Capability")


@dataclass(frozen=True, slots=True)
class CheckScope:
    """The tensors of a checksum or a comparison, and the detail of a checksum."""

    skip: tuple[str, ...] = ()
    """A tensor whose name contains one of these texts is left out."""
    per_tensor: bool = False
    """A checksum also has the hash of each tensor."""

    def covers(self, name: str) -> bool:
        return not any(text in name for text in self.skip)


WHOLE = CheckScope()
"""Every tensor, and one checksum for all."""


@runtime_checkable
class CanReportLoad(Protocol):
    """Reports its load beyond what `EngineAdapter.load` says. No op needs it: metrics show it."""

    @abstractmethod
    async def engine_load(self) -> EngineLoadReply | None:
        """The load now, or None if it is not known. It may wait for a step of the engine."""


@runtime_checkable
class CanTokenize(Protocol):
    """Turns text into tokens and back."""

    @abstractmethod
    async def tokenize(self, body: Tokenize) -> list[int]:
        """The tokens that `generate` would make of this prompt or these messages. Raises InvalidRequest for messages
        that the chat template refuses."""

    @abstractmethod
    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of these tokens, special tokens included. Raises InvalidRequest (`field="tokens"`) for an id outside
        the vocabulary."""


@runtime_checkable
class CanParseToolCalls(Protocol):
    """Reads the calls that a model has written into a text. Each family of models writes them in its own way."""

    @abstractmethod
    async def parse_tool_calls(self, token_ids: list[int], tools: list[dict[str, Any]]) -> ParsedToolCalls:
        """Returns the calls in the text of these tokens, and the rest of the text. A text that is no call, or that the
        parser can't read, has no calls. Without tokens it checks the tools: InvalidRequest (`field="tools"`) for tools
        that the engine does not take."""


@runtime_checkable
class CanScore(Protocol):
    """Scores given tokens: the canary needs it."""

    @abstractmethod
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The logprob of each token after the first of each sequence, given the tokens before it: the natural-log
        softmax of the raw logits, by the base weights that the engine holds now, whatever adapters are loaded. All
        sequences go through the model together.

        It works while the engine runs and while it is paused in any mode; the engine stays paused. Requests in flight
        make no token meanwhile. They may lose their KV, which they compute again. A score uses no KV that was computed
        before, and leaves none that a later request could find.

        Every score is a finite number: what is below `scoring.LOGPROB_FLOOR` becomes that. Raises
        - EngineFailed if a logprob is NaN,
        - InvalidRequest for sequences outside the bounds of `scoring`, and ids outside the vocabulary,
        - Unavailable while memory is released."""


@runtime_checkable
class CanPool(Protocol):
    """Serves a pooling model: a reward model (`EngineOptions.task` is `classify`), or an embedding model (`embed`).

    The adapter names every other task in `EngineInfo.lacks` (`lacking_tasks`), and sets `EngineInfo.dimension`.
    """

    @abstractmethod
    def pool(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Computes one vector of the prompt: yields one delta with `pooled`, a finish_reason and one span, from 0 to 1.

        All that `EngineAdapter.generate` promises holds: a paused engine computes nothing, `abort` ends the request
        (then the delta has no vector), and a request that is under way while weights are swapped is computed again.
        Only the weights that the span names have computed the vector."""


@runtime_checkable
class CanLoadAdapters(Protocol):
    """Loads LoRA adapters beside the base model."""

    @abstractmethod
    async def swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> bool:
        """Loads the adapter that is staged under `staging`, and replaces the one of this name. `staging` None unloads
        it.

        The engine is paused. When this raises, the old adapter of this name is in place on every rank, or it raises
        AdapterLost. A running request of an adapter that is unloaded ends with finish_reason `abort`. One of an adapter
        that is replaced continues with the new one. Returns True if the prefix cache was flushed, False only where that
        is not needed. The staged adapter is used up, also when this raises."""

    @abstractmethod
    def set_adapter_version(self, name: str, version: WeightVersion) -> None:
        """Labels an adapter that is loaded already. Raises InvalidRequest (`field="name"`) if it is not loaded."""


@runtime_checkable
class CanCheckWeights(Protocol):
    """Checks the bytes of the weights that it serves."""

    @abstractmethod
    async def check_weights(self, action: CheckAction, scope: CheckScope = WHOLE) -> list[dict[str, Any]]:
        """Returns a row per rank. `scope` concerns `checksum` and `compare`.

        - `checksum`: `{rank, checksum}`, which changes with every byte of every parameter. With `scope.per_tensor`
          also `checksums: {name: hash}`.
        - `snapshot`: `{rank}`; keeps a copy of the weights.
        - `compare`: `{rank, match, mismatches: [name]}`, against the copy. Raises InvalidRequest if there is none.
        - `reset_tensors`: `{rank}`; overwrites the weights with noise. Running requests continue, and their tokens have
          no label. The worker closes admission."""


@runtime_checkable
class CanReleaseMemory(Protocol):
    """Gives GPU memory back for a while: a trainer on the same GPU needs it."""

    @abstractmethod
    async def release_memory(self, tags: list[str]) -> None:
        """Releases `weights`, `kv_cache`, or both. Idempotent.

        The engine is paused, and stays paused until all memory is back. Frozen requests continue at the `resume` after
        that, with KV computed again. While only the KV cache is released, weights and adapters can be swapped, checked
        and flushed. Raises InvalidRequest or Unsupported if nothing was released. After any other error, or a cancel,
        the worker may call it again, and `resume_memory` too: the engine then does what is left to do."""

    @abstractmethod
    async def resume_memory(self, tags: list[str]) -> None:
        """Takes memory back. Idempotent. The returned weights are of no version: the worker loads the committed ones
        again."""


class FullEngine(EngineAdapter, CanTokenize, CanScore, CanLoadAdapters, CanCheckWeights, CanReleaseMemory):
    """An engine with every capability."""


OPS: Mapping[type, tuple[str, ...]] = {
    CanTokenize: ("tokenize", "detokenize"),
    CanParseToolCalls: ("parse_tool_calls",),
    CanScore: ("score",),
    CanLoadAdapters: ("prepare_update:lora", "update_weights:lora"),
    CanCheckWeights: ("check_weights",),
    CanReleaseMemory: ("release_memory", "resume_memory"),
}
"""Capability → the ops that need it, as `EngineInfo.lacks` names them."""


def with_missing(adapter: EngineAdapter, info: EngineInfo) -> EngineInfo:
    """`info` that also names the ops of every capability that the adapter does not have. A reason that the engine gave
    itself wins."""
    missing = {
        op: f"the {info.engine} engine does not have it"
        for capability, ops in OPS.items()
        if not isinstance(adapter, capability)
        for op in ops
    }
    if not isinstance(adapter, CanPool):
        missing |= lacking_tasks("generate")
    return replace(info, lacks={**missing, **info.lacks})


def require(adapter: EngineAdapter, capability: type[Capability]) -> Capability:
    """Returns the adapter, typed as the capability. Raises Unsupported if the adapter does not have it."""
    if not isinstance(adapter, capability):
        if capability is CanPool:
            raise Unsupported("this engine serves no pooling model", field="model", fix=LACKING)
        raise Unsupported(f"this engine can't {OPS[capability][0].partition(':')[0]}", field="op", fix=LACKING)
    return adapter
