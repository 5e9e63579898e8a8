"""The `fake` engine: the whole contract of an engine without a model, for tests and for scale.

It holds the bytes of any safetensors model directory, and makes tokens from their digest. The token itself tells which
weights made it (`fake_token`), whatever label the version has. It needs no torch, thread or task of its own, so that
one process may carry a thousand.

- A request's next token is made when its reader asks for it, so a slow reader delays a `pause` in mode `wait`.
- There is no end-of-sequence token: generation ends by `max_tokens`, `stop_token_ids` or `stop`.
- It obeys what a request allows and bars. With `logit_bias`, it makes only the tokens with the highest bias. Sampling
  parameters change nothing.
- With `cast`, bytes stay as they arrived.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from rl_plane.errors import EngineFailed, InvalidRequest, NotAdmitted
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest, Rendering
from rl_plane.protocol.prompt_tops import PromptPlace, PromptTops
from rl_plane.protocol.versions import TensorSpec, WeightVersion
from rl_plane.protocol.worker_ops import Tokenize
from rl_plane.transports.base import WeightTransport
from rl_plane.weights.checkpoint import Checkpoint, open_checkpoint
from worker.engines.base import EngineInfo, EngineOptions, PauseMode
from worker.engines.capabilities import WHOLE, CheckAction, CheckScope, FullEngine
from worker.engines.common.request_gate import GatedRequest, RequestGate
from worker.engines.common.scoring import check_memory, check_sequences, checked_scores
from worker.engines.common.spans import Label, SpanLog
from worker.engines.common.stop_strings import StopStrings
from worker.engines.common.token_checks import (
    NO_EXPERTS,
    NO_FORM,
    check_adapter,
    check_tokens,
    check_tops,
    check_vocabulary,
    kept_of_prompt,
    refuse_lacking,
)
from worker.engines.fake.config import FakeConfig
from worker.engines.fake.fake_model import (
    FIRST_TOKEN,
    FakeAdapter,
    FakeTensor,
    FakeWeights,
    both_digests,
    fake_logprob,
    fake_prompt_logprobs,
    fake_token,
    hash_of,
    hash_of_prompt,
    logprob_of,
    make_fake_adapter,
    make_fake_model,
    permitted,
    token_of,
)
from worker.engines.fake.holder import FakeHolder
from worker.receive.weight_receiver import Receiver, load_transports

__all__ = [
    "FakeAdapter",
    "FakeEngine",
    "FakeWeights",
    "build",
    "fake_logprob",
    "fake_prompt_logprobs",
    "fake_token",
    "make_fake_adapter",
    "make_fake_model",
]

FAKE_VERSION = "1"

LACKS = {"generate:routed_experts": NO_EXPERTS, "generate:structured_output": NO_FORM}

STAGE = "a stage for trials: it has no weights and generates nothing"

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_DTYPE_NAMES = {short: name for name, short in _DTYPES.items()}


class FakeEngine(FullEngine):
    """Tests may change `config` while it runs. `transports` replaces the installed ones."""

    receiver: Receiver

    def __init__(self, options: EngineOptions, transports: Mapping[str, WeightTransport] | None = None) -> None:
        super().__init__()
        self.config = options.arguments(FakeConfig)
        if options.dtype is not None and options.dtype not in _DTYPES:
            raise InvalidRequest(
                f"the dtype is {options.dtype[:64]!r}", field="dtype", fix=f"use one of {', '.join(_DTYPES)}"
            )
        if options.device not in ("auto", "cpu"):
            raise InvalidRequest(
                f"the fake engine has no device {options.device[:64]!r}", field="device", fix="use auto or cpu"
            )
        if transports is None:
            transports = load_transports(options.places)
        self.receiver = Receiver(FakeHolder(self), transports)
        self._options = options
        self._specs: dict[str, TensorSpec] = {}
        self.weights: FakeWeights | None = None
        """The weights that it computes with. None before the start and after the close."""
        self._miscomputes = False  # `miscompute` was set at the last swap
        self._snapshot: FakeWeights | None = None
        self.version: WeightVersion | None = None
        """The version that it calls its weights."""
        self.adapters: dict[str, FakeAdapter] = {}
        self.gate = RequestGate()
        self._released: set[str] = set()
        self._closed = False

    # life

    async def start(self) -> EngineInfo:
        if self.config.pipeline_stage:
            return self._info("none", STAGE)
        weights = await asyncio.to_thread(self._load)
        if self._closed:
            raise EngineFailed("the fake engine was closed while it started")
        self.weights = weights
        wanted = _DTYPES.get(self._options.dtype or "")
        self._specs = {
            name: TensorSpec(wanted, tensor.spec.shape)
            if wanted is not None and tensor.spec.dtype in _DTYPE_NAMES
            else tensor.spec
            for name, tensor in weights.tensors.items()
        }
        sizes: Counter[str] = Counter()
        for spec in self._specs.values():
            sizes[spec.dtype] += spec.nbytes
        dtype = max(sorted(sizes), key=sizes.__getitem__, default="F32")
        return self._info(_DTYPE_NAMES.get(dtype, dtype.lower()))

    def _info(self, dtype: str, stage: str | None = None) -> EngineInfo:
        return EngineInfo(
            engine="fake",
            engine_version=FAKE_VERSION,
            model=self._options.model.resolve().name,
            dtype=dtype,
            device="cpu",
            world_size=1,
            vocab_size=self.config.vocab_size,
            max_model_len=self.config.max_model_len,
            lacks=LACKS,
            deterministic=True,
            memory_saver=True,
            transports=self.receiver.backends if stage is None else (),
            pipeline_stage=stage,
            witnesses=self.config.witnesses,
            logprobs_mode=self._options.logprobs_mode,  # its logprobs are made up
            max_prompt_top_logprobs=self.config.max_prompt_top_logprobs,
        )

    def _load(self) -> FakeWeights:
        with closing(open_checkpoint(self._options.model, field="model")) as checkpoint:
            return FakeWeights(self._read(checkpoint))

    def _read(self, checkpoint: Checkpoint) -> dict[str, FakeTensor]:
        if not self.config.hold_bytes:
            digests = checkpoint.tensor_digests()
            return {name: FakeTensor(spec, digests[name], None) for name, spec in checkpoint.specs.items()}
        return {name: FakeTensor.of(tensor.spec, bytes(tensor.data)) for name, tensor in checkpoint.tensors()}

    async def close(self) -> None:
        self._closed = True
        self.gate.abort(None, "error")
        self.weights = self._snapshot = self.version = None
        self.adapters = {}

    async def liveness(self) -> None:
        if self.config.hang_liveness:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self._closed or not self.config.pipeline_stage:
            self._held()

    def _held(self) -> FakeWeights:
        if self.weights is None:
            raise EngineFailed("the fake engine is not running")
        return self.weights

    def _computed_with(self) -> str:
        """The digest that tokens and scores follow from."""
        digest = self._held().digest
        return f"other than {digest}" if self._miscomputes else digest

    # generation

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        self._held()
        prompt = self._prompt(request)
        if self._released:
            raise NotAdmitted(f"memory is released ({', '.join(sorted(self._released))}): resume it first")
        check_adapter(request.adapter, self.adapters, "model")
        running, spans, prompt_hash = self.gate.enter(request), SpanLog(), hash_of_prompt(prompt)
        first: list[int] | None = prompt
        stops = frozenset(request.stop_token_ids)
        strings = StopStrings(request.stop, request.include_stop_str_in_output)
        tokens: list[int] = []
        try:
            while True:
                await self._turn(running)
                if running.ended is not None:
                    break
                # Nothing waits from here to the yield: token and label are of the same weights.
                adapter = self.adapters[request.adapter] if request.adapter is not None else None
                digests = self._computed_with(), None if adapter is None else adapter.digest
                weights = both_digests(*digests)
                scored = None
                if request.prompt_logprobs and not tokens:
                    scored = fake_prompt_logprobs(digests[0], prompt, digests[1])
                made = hash_of(weights, prompt_hash, len(tokens))
                token = permitted(request, token_of(made, self.config.vocab_size), tokens, self.config.vocab_size)
                tokens.append(token)
                running.has_token = True
                version = self.version if self.config.witnesses else None
                kv = running.kv if running.kv != version else None
                spans.add(Label(version, request.adapter, adapter.version if adapter else None, kv))
                text = strings.add(_text_of(token), counts=len(tokens) > request.min_tokens)
                if token in stops or strings.found is not None:
                    running.ended = "stop"
                elif len(tokens) >= request.max_tokens:
                    running.ended = "length"
                if running.ended is not None:
                    self.gate.leave(running)
                    text += strings.rest()
                tops = None
                if request.logprobs and request.top_logprobs:
                    tops = [self._likeliest(token, logprob_of(made), request.top_logprobs)]
                yield GenerateDelta(
                    token_ids=[token],
                    logprobs=[logprob_of(made)] if request.logprobs else None,
                    top_logprobs=tops,
                    token_texts={str(one): _text_of(one) for one in {token, *dict(tops[0] if tops else ())}}
                    if request.logprobs and request.token_texts
                    else None,
                    text=text,
                    finish_reason=running.ended,
                    stop_string=strings.found,
                    spans=spans.tell(running.ended is not None),
                    prompt_token_ids=first,
                    prompt_logprobs=scored,
                    **(self._prompt_facts(request, prompt, scored) if first else {}),
                )
                if running.ended in ("stop", "length"):
                    return
                first = None
            yield GenerateDelta(
                token_ids=[],
                logprobs=[] if request.logprobs else None,
                top_logprobs=[] if request.logprobs and request.top_logprobs else None,
                text=strings.rest(),
                finish_reason=running.ended,
                spans=spans.tell(True),
                prompt_token_ids=first,
            )
        finally:
            self.gate.leave(running)

    def _likeliest(self, token: int, logprob: float, count: int) -> list[tuple[int, float]]:
        """The token, then the tokens that follow it in the vocabulary."""
        return [((token + place) % self.config.vocab_size, logprob - place) for place in range(count)]

    def _prompt_facts(
        self, request: GenerateRequest, prompt: list[int], scored: list[float | None] | None
    ) -> dict[str, Any]:
        """The fields of the first delta that have the prompt's texts and likeliest tokens."""
        facts: dict[str, Any] = {}
        if request.prompt_text:
            facts["prompt_text"] = "".join(map(_text_of, prompt))
        if scored is not None:
            count = request.prompt_top_logprobs
            rows = zip(prompt[1:], scored[1:], strict=True)
            tops = [self._likeliest(token, logprob or 0.0, count) for token, logprob in rows]
            facts["prompt_tops"] = PromptTops.of(count, (PromptPlace(1, top) for top in tops))
            if request.prompt_token_texts:
                named = {*prompt, *(token for top in tops for token, _ in top)}
                facts["prompt_token_texts"] = {str(token): _text_of(token) for token in named}
        return facts

    def _prompt(self, request: GenerateRequest) -> list[int]:
        request.check_one_prompt()
        if request.prompt_token_ids is not None:
            prompt = list(request.prompt_token_ids)
        else:
            prompt = self._tokens(request.prompt, request.messages, request.rendering)
        prompt = kept_of_prompt(request, prompt)
        check_tokens(request, prompt, frozenset(), self.config.vocab_size, self.config.max_model_len)
        refuse_lacking(request, LACKS)
        check_tops(request, self.config.max_prompt_top_logprobs)
        return prompt

    def _tokens(self, text: str | None, messages: list[dict[str, Any]] | None, rendering: Rendering) -> list[int]:
        letters = self.config.vocab_size - FIRST_TOKEN
        text = text if text is not None else _rendered(messages or [], rendering)
        return [FIRST_TOKEN + byte % letters for byte in text.encode("utf-8", "surrogatepass")]

    async def tokenize(self, body: Tokenize) -> list[int]:
        """Makes a token of each byte. There are no special tokens."""
        self._held()
        return self._tokens(body.prompt, body.messages, body.rendering)

    async def detokenize(self, token_ids: list[int]) -> str:
        """Makes the text that a reply with these tokens has."""
        self._held()
        check_vocabulary("tokens", token_ids, self.config.vocab_size)
        return "".join(map(_text_of, token_ids))

    async def _turn(self, running: GatedRequest) -> None:
        await self.gate.turn(running, self.config.token_delay_s)

    async def abort(self, request_ids: list[str] | None) -> int:
        return self.gate.abort(request_ids)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        self._held()
        await self.gate.pause(mode)
        return clear_cache and await self.flush_cache()

    async def resume(self) -> None:
        self._held()
        if self._released:
            raise EngineFailed(f"memory is released ({', '.join(sorted(self._released))}): a step has no place")
        self.gate.resume()

    async def flush_cache(self) -> bool:
        """Returns True: there is no prefix cache, and nothing is ever reused."""
        self._held()
        return True

    def load(self) -> tuple[int, int]:
        return self.gate.load()

    # weights

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        self._held()
        return self._specs

    async def swap(self, staging: str, version: WeightVersion, *, keep_kv: bool = False) -> bool:
        served = self.version
        names = self.receiver.changed_since(staging, served.digest if served is not None else None)
        staged = self.receiver.take(staging)
        if not isinstance(staged, FakeWeights):
            raise EngineFailed(f"{staging} is an adapter")
        await self._before_a_swap()
        self.gate.keep_kv(self.version if keep_kv else None)
        if names is not None and self.version == served:
            self.weights = self._held().with_some(staged, names)
        else:
            self.weights = staged
        self.version = version
        self._miscomputes = self.config.miscompute
        return await self.flush_cache()

    def set_version(self, version: WeightVersion) -> None:
        self._held()
        self.version = version

    async def _before_a_swap(self) -> None:
        self._check_swappable()
        if self.config.swap_delay_s:
            await asyncio.sleep(self.config.swap_delay_s)
            self._check_swappable()
        if self.config.fail_swap:
            raise EngineFailed("fail_swap is set")

    def _check_swappable(self) -> None:
        self._held()
        if not self.gate.is_paused:
            raise EngineFailed("a swap needs a paused engine")
        if "weights" in self._released:
            raise EngineFailed("the weights' memory is released: resume it first")

    @contextmanager
    def half_written(self) -> Iterator[dict[str, FakeTensor]]:
        """Gives the served tensors, to be overwritten one by one. From here on the weights are of no version."""
        self._check_swappable()
        mixed = dict(self._held().tensors)
        # A copy: a snapshot may share the served tensors.
        self.weights, self.version = FakeWeights(mixed), None
        try:
            yield mixed
        finally:
            if not self._closed:
                self.weights = FakeWeights(mixed)  # its digest is the one of these bytes, also half-way
                self._miscomputes = self.config.miscompute

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the logprobs of `fake_prompt_logprobs`, without the first token's."""
        self._held()
        checked = check_sequences(sequences, self.config.vocab_size, self.config.max_model_len)
        check_memory(self._released)
        await asyncio.sleep(0)
        rows = [fake_prompt_logprobs(self._computed_with(), sequence)[1:] for sequence in checked]
        return checked_scores([[value for value in row if value is not None] for row in rows], checked)

    # adapters

    async def swap_adapter(self, name: str, staging: str | None, version: WeightVersion | None) -> bool:
        staged = None if staging is None else self.receiver.take(staging)
        if staged is not None and not isinstance(staged, FakeAdapter):
            raise EngineFailed(f"{staging} is no adapter")
        await self._before_a_swap()
        if staged is None:
            self.adapters.pop(name, None)
            self.gate.abort_adapter(name)
        else:
            staged.version = version
            self.adapters[name] = staged
        return await self.flush_cache()

    def set_adapter_version(self, name: str, version: WeightVersion) -> None:
        self._held()
        check_adapter(name, self.adapters, "name")
        self.adapters[name].version = version

    async def check_weights(self, action: CheckAction, scope: CheckScope = WHOLE) -> list[dict[str, Any]]:
        held = self._held()
        if "weights" in self._released:
            raise EngineFailed("the weights' memory is released: resume it first")
        if action == "checksum":
            return [{"rank": 0, **await asyncio.to_thread(held.checksum, scope)}]
        if action == "snapshot":
            self._snapshot = held  # weights are never changed in place, so a reference is a copy
            return [{"rank": 0}]
        if action == "compare":
            if self._snapshot is None:
                raise InvalidRequest("there is no snapshot", field="action", fix="take a snapshot first")
            differ = await asyncio.to_thread(held.mismatches, self._snapshot)
            mismatches = [name for name in differ if scope.covers(name)]
            return [{"rank": 0, "match": not mismatches, "mismatches": mismatches}]
        self.weights = await asyncio.to_thread(held.noise)
        self.version = None  # noise is no version
        return [{"rank": 0}]

    async def release_memory(self, tags: list[str]) -> None:
        """Sets flags only. The bytes stay."""
        self._held()
        if not self.gate.is_paused and self.gate.load()[0]:
            raise InvalidRequest("requests are running", field="tags", fix="pause first, then release memory")
        self._released |= set(tags)

    async def resume_memory(self, tags: list[str]) -> None:
        self._held()
        self._released -= set(tags)


def _text_of(token: int) -> str:
    return f" t{token}"


def _rendered(messages: list[dict[str, Any]], rendering: Rendering) -> str:
    """The chat template: the rendering's settings as JSON, then the messages' texts, one after the other."""

    def refuse(number: int) -> InvalidRequest:
        return InvalidRequest(
            f"messages[{number}] has no text",
            field=f"messages.{number}.content",
            fix="give content as a string, or as a list of {type: text, text: …}",
        )

    besides = rendering.model_dump(exclude_defaults=True)
    texts = [json.dumps(besides)] if besides else []
    for number, message in enumerate(messages):
        content = message.get("content")
        if more := {key: value for key, value in message.items() if key not in ("role", "content")}:
            texts.append(json.dumps(more))
        if isinstance(content, str):
            texts.append(content)
            continue
        if not isinstance(content, list):
            raise refuse(number)
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise refuse(number)
            texts.append(part["text"])
    return "".join(texts)


def build(options: EngineOptions) -> FakeEngine:
    return FakeEngine(options)
