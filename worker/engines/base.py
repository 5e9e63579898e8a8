"""The seam between the worker and its engine: the contract of an EngineAdapter.

Life: `build(options)` makes the adapter without starting anything; `start()` builds the engine; after it
`generate` works; `close()` ends the engine and every process and thread that it made, and may be called at
any time, twice included. All coroutines run on the engine loop, which is not the loop that serves NATS; a
call that blocks for more than a few milliseconds goes to a thread of the adapter's.

The worker calls the changing methods (pause, resume, swap, flush, score, …) one at a time. `generate`, `abort` and
`liveness` may run at any moment, those included. A method raises a PlaneError: `Unsupported` with the reason
for what this engine or build can't do, `InvalidRequest` for bad input (the engine then serves on as before),
`EngineFailed` when the engine itself fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rl_plane.errors import EngineFailed, InvalidRequest, PlaneError
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.subjects import DEFAULT_COMPONENT, DEFAULT_NAMESPACE, DEFAULT_NATS_URL
from rl_plane.protocol.update_requests import PreparedReply
from rl_plane.protocol.versions import TensorSpec, WeightVersion
from rl_plane.protocol.worker_ops import Tokenize
from rl_plane.transports.receiver_base import Places
from rl_plane.transports.reception import Cancelled, Reception

LACKING = "do without, or name workers that can: describe tells what each lacks"
"""The fix of what one engine can't do."""

DTYPES = ("float32", "bfloat16", "float16")
PauseMode = Literal["keep", "wait", "abort"]
CheckAction = Literal["checksum", "snapshot", "compare", "reset_tensors"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What `rl-plane worker` knows when it builds an adapter."""

    model: Path
    """A Hugging Face model directory."""
    dtype: str | None = None
    """`float32`, `bfloat16` or `float16`; None: as the checkpoint says."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, …; `auto`: a GPU when there is one. What the engine can't have is an InvalidRequest."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """`--engine-arg key=value` and `--engine-args-file`, as typed, keys with `_`. An unknown key is an InvalidRequest
    of the field `engine_arg.<key>`, and so is a value that the key can't have: from `build`, where it can be told."""
    weight_roots: tuple[Path, ...] = ()
    """The only directories, besides the model's, that weights are read from."""
    nats_url: str = DEFAULT_NATS_URL
    """By which weights may come too."""
    namespace: str = DEFAULT_NAMESPACE
    component: str = DEFAULT_COMPONENT
    deterministic: bool = False
    """The same tokens whatever else is in the batch."""
    memory_saver: bool = False
    """Memory can be released and resumed."""

    @property
    def places(self) -> Places:
        return Places((*self.weight_roots, self.model), self.nats_url, self.namespace, self.component)

    def check_model(self) -> None:
        """For an engine of models of transformers'."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InvalidRequest(f"unknown dtype {self.dtype}", field="dtype", fix=f"one of {', '.join(DTYPES)}")
        if not (self.model / "config.json").is_file():
            raise InvalidRequest(
                f"{self.model} has no config.json", field="model", fix="give a Hugging Face model directory"
            )

    def refuse_modes(self, why: str, fix: str) -> None:
        """For an engine, or a build of it, that has neither of the two."""
        for name, given in (("deterministic", self.deterministic), ("enable_memory_saver", self.memory_saver)):
            if given:
                raise InvalidRequest(why, field=name, fix=fix)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine is, fixed once it has started."""

    engine: str
    engine_version: str
    model: str
    """The name that requests use: the model directory's last part, unless configured."""
    dtype: str
    device: str
    world_size: int
    """Ranks of tensor parallelism × pipeline parallelism."""
    vocab_size: int
    max_model_len: int
    """Prompt and new tokens together."""
    capabilities: Mapping[str, str]
    """Op → why not: the ops (or `op:variant`) that this engine can't do, each with the reason."""
    transports: tuple[str, ...]
    """What its receivers can receive by."""
    deterministic: bool = False
    memory_saver: bool = False
    witnesses: bool = True
    """False: it can't tell which weights make its tokens. The spans of its deltas are not looked at; its tokens are
    delivered as of `unknown` weights, to requests that demand nothing of them."""
    max_adapters: int | None = None
    """That may be loaded at once. None: as many as there is memory for."""
    max_lora_rank: int | None = None
    """None: any."""
    tp_size: int = 1
    """Of `world_size`, those of tensor parallelism."""
    pp_size: int = 1
    """And the stages of its pipeline."""
    stage: str | None = None
    """Why this is no engine but a stage before or after the model: it has no weights and generates nothing. Its worker
    calls `start`, `liveness` and `close` only, and skips all else with these words; it has no rank and no vote, takes
    no update and no request. Never for what serves the model. None: an engine."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that a checkpoint may also hold → the tensor of `weight_spec` to which the model ties each."""

    def check_place(self, adapter: str, loaded: Collection[str]) -> None:
        """For this adapter, beside those that are loaded."""
        if self.max_adapters is not None and adapter not in loaded and len(loaded) >= self.max_adapters:
            raise InvalidRequest(
                f"{len(loaded)} adapters are loaded, more have no place here",
                field="target.name",
                fix="unload one, or start the engine with a larger --engine-arg max_loras",
            )


class AdapterLost(EngineFailed):
    """A change of an adapter failed, and could not be undone: the one that was there is gone, and its requests have
    ended."""

    @classmethod
    def of(cls, name: str, error: BaseException, undoing: PlaneError) -> AdapterLost:
        return cls(f"{error}; the adapter {name} could not be put back: {undoing.message}", **undoing.facts)


class EngineAdapter(Protocol):
    async def start(self) -> EngineInfo: ...

    async def close(self) -> None: ...

    async def liveness(self) -> None:
        """A real round trip through the engine, also while it is paused; the caller bounds it."""

    # generation

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Validates first (InvalidRequest before any token), then yields until a delta has a finish_reason.

        Closing the iterator aborts the request in the engine. While paused, requests wait.
        Prompt logprobs and first token are of the same weights: a prefill that asked for them and is cut by a change
        of weights begins anew.
        The tokens of a delta are all of the same weights: a request may want those of one version only.
        Spans are made of the versions given to `swap`, `set_version` and their like for adapters. An adapter that is
        not loaded is an InvalidRequest (`field="model"`).
        """

    async def abort(self, request_ids: list[str] | None) -> int:
        """Ends these requests (None: all) with finish_reason `abort` and their tokens so far; how many."""

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        """`keep`: requests freeze between two tokens, and go on at `resume`. `wait`: returns when the running
        requests have ended; requests that arrive meanwhile wait. `abort`: ends them all (see `abort`).
        With `clear_cache` the prefix cache is dropped too; True if it was. Idempotent.
        One that is cancelled or raises leaves the engine as it was, running or paused; requests that `abort` has ended
        have ended."""

    async def resume(self) -> None:
        """Idempotent. Not called while memory is released."""

    async def flush_cache(self) -> bool:
        """Drops the prefix cache; True only if it happened."""

    def load(self) -> tuple[int, int]:
        """(running, waiting) requests, without asking the engine. Called on another thread than the rest."""

    async def tokenize(self, body: Tokenize) -> list[int]:
        """As `generate` makes a prompt's tokens. InvalidRequest for messages that the chat template refuses."""

    async def detokenize(self, token_ids: list[int]) -> str:
        """With special tokens. InvalidRequest (`field="tokens"`) for one outside the vocabulary."""

    # weights: what is received is staged beside the model, in every rank, under the reception's name

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        """Every tensor that a full checkpoint must hold, by its checkpoint name."""

    def open(self, reception: Reception) -> None:
        """In every rank: opens what the reception describes, and checks what can be without its bytes. Touches
        nothing. InvalidRequest or InvalidWeights. Blocks, on a thread of the worker's."""

    def receive(self, staging: str, cancelled: Cancelled) -> PreparedReply:
        """Brings what was opened under this name into staging, complete and verified, while generation goes on. Ends
        early with an EngineFailed when `cancelled()`. InvalidWeights for what does not fit. When it raises, nothing
        stays staged or open. Where ranks receive in processes of their own, the reply has what each of them staged
        (`ranks`). Blocks, on a thread of the worker's.

        With `in_place` it is written over the served weights as it comes. The engine is paused; when this raises, its
        weights are of no version. They are labelled by a `set_version` that follows."""

    def feed(self, staging: str, part: Mapping[str, Any], cancelled: Cancelled) -> int:
        """In every rank: of what is being received under this name, these tensors come now (`ops.ReceivePart`). Returns
        when all are staged, how many are missing yet; when it raises, that receive ends. Blocks, on a thread of the
        worker's."""

    def kept(self) -> str | None:
        """The digest of the version that every rank keeps in host memory (`Reception.keep`); None: there is none, or
        not the same in all. Blocks, on a thread of the worker's."""

    async def discard(self, staging: str) -> None:
        """Frees what is opened or staged under this name; nothing there is no error."""

    async def swap(self, staging: str, version: WeightVersion) -> bool:
        """Replaces all weights at once, between two steps, and labels what follows with `version`. The engine
        is paused (`keep` or emptied); it stays so. Running requests go on with the KV that they have, or
        with one made anew, as the engine can; after weights of no version always with one made anew. No new request
        reuses KV made before; True if the prefix cache was flushed for that, False only where it need not be:
        EngineFailed where it could not. The staging is used up, also when this raises."""

    def offer(self) -> dict[str, Any] | None:
        """Where others may fetch the base weights that are kept here beside the model, `{digest, transport}`, until
        others come; None: none are kept, or by no transport that can. Blocks, on a thread of the worker's."""

    def set_version(self, version: WeightVersion) -> None:
        """Labels the weights that the engine holds already (sequence 0, or a relabel of equal bytes)."""

    def init_transport(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sets a transport up in every rank: one row for each, `{rank, …}`. Blocks, on a thread of the worker's."""

    def destroy_transport(self, backend: str, group: str | None = None) -> list[dict[str, Any]]:
        """Likewise. `group`: of several of this backend, only this one."""

    async def score(self, sequences: Sequence[Sequence[int]], adapter: str | None = None) -> list[list[float]]:
        """The logprob of each token after the first of each sequence, given the tokens before it: the natural-log
        softmax of the raw logits, by the weights that the engine holds now. All sequences go through the model
        together. `adapter` None scores the base model, whatever adapters are loaded.

        Works while the engine is paused in any mode, which it then stays, and while it runs. Requests in flight make no
        token meanwhile. They may lose their KV, which they compute anew when they go on. No KV that was computed before
        is used, and no later request finds KV that a score has left behind.

        -inf is told as `scoring.LOGPROB_FLOOR`, and so is what is lower: every score is a finite number. EngineFailed
        where a logprob is NaN. InvalidRequest for sequences outside the bounds of `scoring`, for ids outside the
        vocabulary, and for an adapter that is not loaded (`field="adapter"`). Unavailable while memory is released: ask
        again after `resume_memory`. Unsupported, with the reason that `capabilities` has under `score`, where this
        engine can't."""

    # adapters (LoRA); where the engine has none, `capabilities` has `prepare_update:lora` and these raise Unsupported

    async def swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> bool:
        """Loads an adapter, or puts it in the place of the one of this name; `staging` None takes it away. All or
        nothing: when this raises, the adapter of this name is as it was on every rank, or it is an AdapterLost. The
        engine is paused. A running request of an adapter that is taken away ends with finish_reason `abort`; one of an
        adapter that is replaced goes on by the new one. True if the prefix cache was flushed, False only where it need
        not be. The staging is used up, also when this raises."""

    def set_adapter_version(self, name: str, version: WeightVersion) -> None: ...

    async def check_weights(self, action: CheckAction) -> list[dict[str, Any]]:
        """One row per rank. `checksum`: `{rank, checksum}`, sensitive to every byte of every parameter.
        `snapshot` keeps a copy; `compare`: `{rank, match, mismatches: [name]}` against it;
        `reset_tensors` overwrites the weights with noise (the worker then closes admission); what runs goes on, its
        tokens without a label."""

    async def release_memory(self, tags: list[str]) -> None:
        """`weights`, `kv_cache`, or both; idempotent. The engine is paused, and stays so until all memory is back:
        frozen requests go on at the `resume` after it, by KV that is computed anew.
        While the KV cache alone is released, weights and adapters are swapped, checked and flushed as ever.
        InvalidRequest or Unsupported: nothing was released. One that was cancelled or failed otherwise may be asked
        again, as may `resume_memory`: then it does what is left to do."""

    async def resume_memory(self, tags: list[str]) -> None:
        """Idempotent. The weights that come back are taken for lost."""


EngineFactory = Callable[[EngineOptions], EngineAdapter]
"""What an entry point of the group `rl_plane.engines` names."""
