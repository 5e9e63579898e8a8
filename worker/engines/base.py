"""The contract between the worker and its engine: `EngineAdapter`, and what it says of itself.

To write an engine, read docs/engine-of-your-own.md: subclass `EngineAdapter`, and the protocols of
`worker.engines.capabilities` that the engine can do.

Threads: every coroutine runs on one event loop, the engine loop. It is not the loop that serves NATS. A method that
blocks for more than a few milliseconds moves that work to a thread of its own. The docstrings name the methods that the
worker calls on a thread.

Concurrency: the worker calls the methods that change something (`pause`, `resume`, `swap`, `flush_cache`, `score`, …)
one at a time. A deadline cancels a call. The next call comes when the cancelled one has ended, or 5 s later.
`generate`, `abort`, `liveness` and `load` may run at any moment, during those calls too.

Errors: a method raises a `PlaneError`.
    Unsupported     this engine or build can't do it; the message says why
    InvalidRequest  the input is wrong; the engine serves on as before
    EngineFailed    the engine failed
    EngineHung      the engine, or another host's part of it, does not answer now
    EngineDied      a process of the engine ended: the worker exits
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from rl_plane.bus.credentials import NO_CREDENTIALS, NatsCredentials
from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError, Unsupported
from rl_plane.protocol.generation import RAW_LOGPROBS, GenerateDelta, GenerateRequest, LogprobsMode
from rl_plane.protocol.pooling import Task
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.protocol.versions import WeightVersion
from rl_plane.transports.base import TransportContext
from worker.receive.receives_weights import ReceivesWeights

if TYPE_CHECKING:  # it needs NATS, which an engine's processes do without
    from worker.nodes.node_link import NodeLink

LACKING = "do without, or name workers that can: describe tells what each lacks"
"""The fix of an op that one engine can't do."""

DTYPES = ("float32", "bfloat16", "float16")
PauseMode = Literal["keep", "wait", "abort"]

Arguments = TypeVar("Arguments", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The settings of `rl-plane worker` that concern its engine."""

    model: Path
    """A Hugging Face model directory."""
    dtype: str | None = None
    """`float32`, `bfloat16` or `float16`. None: the checkpoint's dtype."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, …; `auto` takes a GPU if there is one. A device that the engine can't use is an
    InvalidRequest (`field="device"`)."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """`--engine-arg key=value` and `--engine-args-file`: the text that the user typed, keys with `_`. An unknown key or
    a bad value is an InvalidRequest of the field `engine_arg.<key>`. `build` raises it where it can, else `start`."""
    weight_roots: tuple[Path, ...] = ()
    """The only directories, besides the model's, that weights are read from."""
    nats_url: str = DEFAULT_NATS_URL
    """The NATS server of the fleet: a transport may bring weights through it."""
    namespace: str = DEFAULT_NAMESPACE
    component: str = DEFAULT_COMPONENT
    deterministic: bool = False
    """`--deterministic`: a request makes the same tokens whatever else is in the batch."""
    memory_saver: bool = False
    """`--enable-memory-saver`: memory can be released and resumed."""
    credentials: NatsCredentials = NO_CREDENTIALS
    """The files by which a transport connects to NATS."""
    weight_urls: tuple[str, ...] = ()
    """The only places that weights are fetched from by HTTP: prefixes of URLs."""
    nodes: NodeLink | None = None
    """The link to the other nodes of an engine that spans several hosts. None: one host."""
    task: Task = "generate"
    """`--task`: what the model does. The worker refuses another one than `generate` of an adapter without `CanPool`."""
    logprobs_mode: LogprobsMode = RAW_LOGPROBS
    """`--logprobs-mode`: which logits the logprobs of a completion are of. Those of a prompt are always of the raw
    ones. The worker ends if the started engine has another mode (`EngineInfo.logprobs_mode`)."""

    @property
    def hosts(self) -> int:
        """The number of hosts of the engine."""
        return 1 if self.nodes is None else self.nodes.settings.count

    @property
    def places(self) -> TransportContext:
        return TransportContext(
            (*self.weight_roots, self.model),
            self.nats_url,
            self.namespace,
            self.component,
            credentials=self.credentials,
            weight_urls=self.weight_urls,
        )

    def check_model(self) -> None:
        """Raises InvalidRequest if the model is no Hugging Face model, or the dtype none of `DTYPES`."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InvalidRequest(f"unknown dtype {self.dtype}", field="dtype", fix=f"one of {', '.join(DTYPES)}")
        if not (self.model / "config.json").is_file():
            raise InvalidRequest(
                f"{self.model} has no config.json", field="model", fix="give a Hugging Face model directory"
            )

    def arguments(self, model: type[Arguments]) -> Arguments:
        """Returns `extra` as a pydantic model that has a field for each argument of the engine."""
        try:
            return model.model_validate(self.extra)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = str(first["loc"][0])
            unknown = first["type"] == "extra_forbidden"
            raise InvalidRequest(
                f"the engine has no argument {key[:64]!r}"
                if unknown
                else f"{key} is {self.extra[key][:64]!r}: {first['msg']}",
                field=f"engine_arg.{key[:64]}",
                fix=f"{'use one of' if unknown else 'correct it; the arguments are'} {', '.join(model.model_fields)}",
            ) from error

    def refuse_modes(self, why: str, fix: str) -> None:
        """Raises InvalidRequest if `deterministic` or `memory_saver` is set: this engine or build has neither."""
        for name, given in (("deterministic", self.deterministic), ("enable_memory_saver", self.memory_saver)):
            if given:
                raise InvalidRequest(why, field=name, fix=fix)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a started engine. They don't change while it runs."""

    engine: str
    engine_version: str
    model: str
    """The name that requests use: the last part of the model directory, unless configured otherwise."""
    dtype: str
    device: str
    world_size: int
    """The number of ranks: `tp_size` × `pp_size` × `dp_size`. SGLang's attention data parallelism shares the ranks of
    tensor parallelism: there it is `tp_size` × `pp_size`."""
    vocab_size: int
    """Token ids are below this number."""
    max_model_len: int
    """The largest number of tokens of one request, prompt and new tokens together."""
    lacks: Mapping[str, str]
    """Op → why the engine can't do it. Keys are ops (`score`), variants of ops (`prepare_update:lora`), transports
    (`transport:gloo`), and fields of a generation request (`generate:seed`, or `generate:a+b` for two fields that
    exclude each other). The worker adds the ops of the capability protocols that the adapter does not implement."""
    transports: tuple[str, ...]
    """The backends by which the engine's receivers can receive weights."""
    deterministic: bool = False
    memory_saver: bool = False
    witnesses: bool = True
    """False: the engine can't tell which weights make its tokens. The worker then ignores the spans of its deltas,
    labels its tokens `unknown`, and serves only requests that demand no version."""
    max_adapters: int | None = None
    """The number of adapters that may be loaded at once. None: as many as memory allows."""
    max_lora_rank: int | None = None
    """The largest rank of an adapter. None: any rank."""
    kv_tokens: int | None = None
    """The tokens that the KV cache has room for. None: the engine does not report it."""
    logprobs_mode: LogprobsMode = RAW_LOGPROBS
    """The mode that the engine was started with."""
    max_prompt_top_logprobs: int = 0
    """The largest number of likeliest tokens that the engine returns beside each token of a prompt. 0: it returns
    none."""
    tp_size: int = 1
    """Ranks of tensor parallelism."""
    pp_size: int = 1
    """Stages of pipeline parallelism."""
    dp_size: int = 1
    """Replicas of data parallelism inside the engine."""
    pipeline_stage: str | None = None
    """None for an engine. For a stage before or after the model, the reason that callers read: it has no weights and
    generates nothing. The worker calls only `start`, `liveness` and `close` of it, and skips every op with this reason.
    It has no rank and no vote, and takes no update and no request. Never set it for an engine that serves the model."""
    dimension: int | None = None
    """The size of a pooling model's vectors: the number of labels, or of an embedding's numbers. None: the model makes
    tokens."""
    labels: tuple[str, ...] = ()
    """The names of the labels of a classifier, in the order of its numbers."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that a checkpoint may also hold → the tensor of `weight_spec` that the model ties each to."""

    def require(self, op: str, field: str) -> None:
        """Raises Unsupported if `lacks` has a reason why the engine can't do this op or variant of an op."""
        if (reason := self.lacks.get(op)) is not None:
            raise Unsupported(f"{self.engine}: {reason}", field=field, fix=LACKING)

    def check_place(self, adapter: str, loaded: Collection[str]) -> None:
        """Raises InvalidRequest if `adapter` would be one more than `max_adapters`. `loaded`: the adapters in the
        engine."""
        if self.max_adapters is not None and adapter not in loaded and len(loaded) >= self.max_adapters:
            raise InvalidRequest(
                f"{len(loaded)} adapters are loaded, more have no place here",
                field="target.name",
                fix="unload one, or start the engine with a larger --engine-arg max_loras",
            )


class EngineHung(EngineFailed):
    """The engine does not answer in time. It may answer again; a dead engine does not."""


class AdapterLost(EngineFailed):
    """A change of an adapter failed and could not be undone: the old adapter is gone, and its requests have ended."""

    @classmethod
    def of(cls, name: str, error: BaseException, undoing: PlaneError) -> AdapterLost:
        return cls(f"{error}; the adapter {name} could not be put back: {undoing.message}", **undoing.facts)


class EngineAdapter(ABC):
    """The worker's handle of one engine.

    Life: `build(options)` makes the adapter and starts nothing. It refuses what the options alone show to be wrong.
    Then the worker looks for the other hosts of an engine. `start` builds the engine. `close` ends it.
    """

    receiver: ReceivesWeights
    """Receives the engine's weights. `start` sets it: a `Receiver` for a model in the worker's process. An engine whose
    ranks are processes of their own derives from `WeightsInRanks`, which sets it."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Builds the engine. `generate` works when it returns. If it raises, it has stopped what it had started."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the engine and every process and thread that it made. Running requests end with an error. The worker may
        call it at any time, also before `start`, during a call, and twice."""

    @abstractmethod
    async def liveness(self) -> None:
        """Makes a real round trip through the engine, also while it is paused. The caller bounds it and cancels it.
        Raises EngineFailed if the engine is not running."""

    # generation

    gathers: bool = False
    """True: `generate` itself holds tokens back, as long as `request.gather_s` allows. False: the worker does it."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Generates for one request, until a delta has a `finish_reason`.

        - Raises InvalidRequest before the first token for a request that the engine can't serve: token ids outside the
          vocabulary, too many tokens, an id that is running already, an adapter that is not loaded (`field="model"`).
        - Closing the iterator aborts the request in the engine.
        - While the engine is paused, requests wait.
        - The first delta has `prompt_token_ids`.
        - All tokens of one delta are of the same weights. Spans name the versions that `swap`, `set_version`,
          `swap_adapter` and `set_adapter_version` gave.
        - Prompt logprobs are of the same weights as the first token: if the weights change during such a prefill, the
          engine computes the prefill again.
        """

    @abstractmethod
    async def abort(self, request_ids: list[str] | None) -> int:
        """Ends these requests (None: all) with finish_reason `abort` and the tokens that they have so far. Returns how
        many requests it ended; unknown ids count as none."""

    @abstractmethod
    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        """Stops generation. Idempotent. Returns True if it dropped the prefix cache, which `clear_cache` asks for.

        - `keep`: requests freeze between two tokens and continue at `resume`.
        - `wait`: returns when the running requests have ended. Requests that arrive meanwhile wait for `resume`.
        - `abort`: ends all requests, as `abort(None)` does.

        If it raises or is cancelled, the engine is as it was before, running or paused. Requests that mode `abort` has
        ended stay ended.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Continues generation. Idempotent. The worker does not call it while memory is released."""

    @abstractmethod
    async def flush_cache(self) -> bool:
        """Drops the prefix cache. Returns True only if that happened."""

    @abstractmethod
    def load(self) -> tuple[int, int]:
        """Returns (running, waiting) requests without asking the engine. The worker calls it on any thread."""

    # weights

    @abstractmethod
    async def swap(self, staging: str, version: WeightVersion, *, keep_kv: bool = False) -> bool:
        """Replaces all base weights at once, between two steps, by those staged under this name. Labels the tokens that
        follow with `version`.

        The engine is paused, and stays paused. Running requests continue after `resume`, and compute their KV again.
        With `keep_kv`, requests that have made a token keep their KV, where the engine can do that. The labels of their
        later tokens then have `kv`. After weights of no version KV is always computed again.

        No new request may reuse KV of the old weights: returns True if the prefix cache was flushed for that, False
        only where that is not needed, and raises EngineFailed where it was needed and did not work. The staged weights
        are used up, also when this raises."""

    @abstractmethod
    def set_version(self, version: WeightVersion) -> None:
        """Labels the base weights that the engine holds already: after `start`, or when equal bytes get another
        label."""


EngineFactory = Callable[[EngineOptions], EngineAdapter]
"""The function that an entry point of the group `rl_plane.engines` names."""
