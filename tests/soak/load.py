"""Clients that ask for tokens without an end, in every way there is, and give what they get to the checker."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.soak.checker import Checker, Delivered, Fault, check_partial, sequence_of
from tests.soak.routes import ROUTES, Choice, Tokens
from worker.testing.tiny_model import VOCAB_SIZE

REPLY_S = 45.0
"""The bound in seconds for each part of a reply: a frontend holds a request for up to 10 s while the fleet heals."""
BACK_OFF_S = 0.2
"""The pause in seconds after a transient error."""
TRANSIENT = frozenset(
    {
        "unavailable",
        "not_admitted",
        "no_workers",
        "worker_lost",
        "stale_weights",
        "engine_died",
        "frontend_ending",
    }
)
"""The error codes that a client may get while processes die."""
OF_WORKERS = frozenset({"worker_lost", "stale_weights", "engine_died"})
"""The TRANSIENT codes that are faults where no worker died."""
KINDS = (*("stream", "stream", "unary", "unary", "many", "many_streamed", "leaves", "leaves_unary") * 4, "slow")
"""`many`: n > 1; `leaves`: the client is gone before the end; `slow`: a stream whose reader stands still meanwhile."""
STILL_S = 12.0
"""Twice the time in seconds for which a frontend delivers tokens of replaced weights."""
SLOW_TOKENS, SLOW_TOPS = (400, 800), 20
"""The lengths of a slow stream and its logprobs per token: over a kilobyte per token, more in all than the sockets
buffer."""
SLOW_BYTES = 1 << 15
"""The size of a slow reader's receive buffer."""
DEMANDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"migrate": True},
    {"migrate": True},
    {"one_version": True, "on_stale": "cut"},
    {"one_version": True, "on_stale": "wait"},
    {"min_version": None},
    {"max_lag": 0, "on_stale": "refuse"},
    {"max_lag": 0, "on_stale": "cut"},
    {"max_lag": 1, "on_stale": "wait"},
)
"""The demands of requests on the weights. A `min_version` of None means the version served when the request begins."""
SESSION = "X-Session-ID"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Its client's name and number determine it."""

    name: str
    kind: str
    route: int
    """An index into ROUTES."""
    adapter: str | None
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    frontend: int
    leaves_after: int
    """Chunks, or hundredths of a second."""
    demands: int
    """An index into DEMANDS."""
    session: str | None

    @property
    def streamed(self) -> bool:
        return self.kind in ("stream", "many_streamed", "leaves", "slow")

    @property
    def path(self) -> str:
        return ROUTES[self.route].path

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.session is None else {SESSION: self.session}

    def body(self, served: int) -> dict[str, Any]:
        """Returns the request's body. `served` is the newest version that is certainly served."""
        demands = DEMANDS[self.demands]
        if "min_version" in demands:
            demands = {"min_version": served}
        tops = SLOW_TOPS if self.kind == "slow" else 0
        asked = Tokens(self.prompt, self.max_tokens, self.n, self.adapter, self.streamed, demands, tops)
        return ROUTES[self.route].body(asked)


def draw(client: str, number: int, seed: int, frontends: int, adapters: Sequence[str]) -> Ask:
    """Returns the request number `number` of the client that this seed makes."""
    chance = random.Random(f"{seed} {client} {number}")
    kind = chance.choice(KINDS)
    long = kind in ("stream", "leaves") and chance.random() < 0.5
    adapter = chance.choice([None, None, *adapters])
    tokens = SLOW_TOKENS if kind == "slow" else (120, 400) if long else (1, 48)
    return Ask(
        name=f"{client}#{number}",
        kind=kind,
        route=chance.randrange(len(ROUTES)),
        adapter=adapter,
        prompt=tuple(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 24))),
        max_tokens=chance.randint(*tokens),
        n=chance.randint(2, 4) if kind.startswith("many") else 1,
        frontend=chance.randrange(frontends),
        leaves_after=chance.randint(1, 20),
        demands=chance.randrange(len(DEMANDS)),
        session=client if chance.random() < 0.5 else None,
    )


@dataclass(slots=True)
class Floors:
    """The newest version of the base (None) and of each adapter that is certainly served."""

    sequences: dict[str | None, int] = field(default_factory=dict)

    def raise_to(self, name: str | None, sequence: int) -> None:
        self.sequences[name] = max(sequence, self.sequences.get(name, 0))


@dataclass(slots=True)
class Told:
    """The tokens, spans and errors that one request has received so far."""

    tokens: dict[int, list[int]]
    spans: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    workers: dict[int, str] = field(default_factory=dict)
    cut: dict[int, str] = field(default_factory=dict)
    """The demand that ended a choice."""
    logprobs: Counter[int] = field(default_factory=Counter)
    error: dict[str, Any] | None = None

    def take(self, choice: Choice) -> None:
        index = choice["index"]
        tokens = choice["token_ids"]
        self.tokens.setdefault(index, []).extend(tokens)
        self.workers[index] = choice["instance_id"]
        if (cut := choice.get("cut")) is not None:
            self.cut[index] = cut["demand"]
        self.logprobs[index] += choice["logprobs"] or 0
        if choice["finish_reason"] is not None:
            self.spans[index] = choice["weight_versions"]
            self.finished[index] = choice["finish_reason"]

    @property
    def newest(self) -> int:
        """Returns the newest sequence that made one of the tokens."""
        spans = (span for choice in self.spans.values() for span in choice)
        return max((sequence_of(span) for span in spans), default=0)


class Clients:
    """`faults` grows; `excuse(frontend, since)` says whether something was killed that explains a broken reply, and
    `aborts(adapter, since)` whether something was done that ends such a choice early."""

    def __init__(
        self,
        urls: Sequence[Callable[[], str]],
        checker: Checker,
        floors: Floors,
        adapters: Mapping[str, bool],
        excuse: Callable[[int | None, float], bool],
        aborts: Callable[[str | None, float], bool],
        *,
        clients: int,
        seed: int,
    ) -> None:
        """`adapters` maps a name to True if the adapter is always loaded."""
        self.faults: list[Fault] = []
        self.done: Counter[str] = Counter()
        """Requests that ended well, by client."""
        self.by_kind: Counter[str] = Counter()
        self.by_route: Counter[str] = Counter()
        """Requests that ended well, by route."""
        self.trouble: Counter[str] = Counter()
        """The other errors that clients got, by code."""
        self._urls, self._checker, self._floors, self._adapters = urls, checker, floors, adapters
        self._excuse, self._aborts, self._seed = excuse, aborts, seed
        self._stop = asyncio.Event()
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(REPLY_S), trust_env=False, limits=httpx.Limits(max_connections=None)
        )
        few = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BYTES)])
        self._slow = httpx.AsyncClient(timeout=httpx.Timeout(REPLY_S), trust_env=False, transport=few)
        self._tasks = [asyncio.create_task(self._forever(f"client{number}")) for number in range(clients)]

    @property
    def clients(self) -> int:
        return len(self._tasks)

    async def stop(self) -> None:
        """Stops the clients. Each ends its present request first."""
        self._stop.set()
        await asyncio.gather(*self._tasks)
        await self.http.aclose()
        await self._slow.aclose()

    async def _forever(self, client: str) -> None:
        number = 0
        while not self._stop.is_set():
            ask = draw(client, number, self._seed, len(self._urls), sorted(self._adapters))
            number += 1
            try:
                good = await self.one(ask)
            except Exception as error:  # an answer that can't be read is a fault, and the others continue
                self.faults.append(
                    Fault("wrong", ask.name, "", "", f"unreadable: {type(error).__name__}: {error}")
                )
                good = False
            self.done[client] += good
            if not good:
                await asyncio.sleep(BACK_OFF_S)

    async def one(self, ask: Ask) -> bool:
        began, floor = time.monotonic(), dict(self._floors.sequences)
        told, left = Told({index: [] for index in range(ask.n)}), False
        body = ask.body(floor.get(None, 0))
        try:
            left = await (self._stream(ask, body, told) if ask.streamed else self._unary(ask, body, told))
        except httpx.TransportError as error:
            self._lost(ask, began, error)
        if told.error is not None:
            self.refused(ask, began, told)
        for index, demand in told.cut.items():
            if demand not in DEMANDS[ask.demands] or told.finished.get(index, "abort") != "abort":
                self._fault(ask, "demand", f"choice {index} was cut by {demand}, and ended by {told.finished}")
        for index in told.tokens:
            self._deliver(ask, began, told, index, floor)
        whole = len(told.finished) == ask.n
        if not whole and told.error is None and not left and not self._excuse(ask.frontend, began):
            self._fault(ask, "lost", f"{len(told.finished)} of {ask.n} choices came to an end, without an error")
        self.by_kind[ask.kind] += whole or left
        self.by_route[ask.path] += whole or left
        return whole or left

    async def _unary(self, ask: Ask, asked: dict[str, Any], told: Told) -> bool:
        """Sends a request without a stream, and returns True if the client left."""
        post = self.http.post(self._urls[ask.frontend]() + ask.path, json=asked, headers=ask.headers)
        if ask.kind == "leaves_unary":
            try:
                async with asyncio.timeout(ask.leaves_after / 100):
                    response = await post
            except TimeoutError:
                return True
        else:
            response = await post
        body = response.json()
        if response.status_code != 200:
            told.error = body["error"]
            for partial in _partials(body["error"]):
                told.tokens[partial["index"]] = list(partial["token_ids"])
                told.spans[partial["index"]] = partial["weight_versions"]
                told.workers[partial["index"]] = partial["instance_id"]
            return False
        choices = list(ROUTES[ask.route].choices(body, {}))
        if sorted(choice["index"] for choice in choices) != list(range(ask.n)):
            self._fault(ask, "wrong", f"choices {[choice['index'] for choice in choices]} of {ask.n}")
        for choice in choices:
            told.take(choice)
        return False

    async def _stream(self, ask: Ask, asked: dict[str, Any], told: Told) -> bool:
        url, chunks, ended = self._urls[ask.frontend]() + ask.path, 0, False
        http = self._slow if ask.kind == "slow" else self.http
        async with http.stream("POST", url, json=asked, headers=ask.headers) as response:
            if response.status_code != 200:
                told.error = json.loads(await response.aread())["error"]
                return False
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if ended:
                    self._fault(ask, "wrong", "something came after [DONE]")
                if line == "data: [DONE]":
                    ended = True
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    told.error = chunk["error"]
                    self._check_partials(ask, told)
                    return False
                for choice in ROUTES[ask.route].choices(chunk, told.tokens):
                    told.take(choice)
                chunks += 1
                if ask.kind == "leaves" and chunks == ask.leaves_after:
                    return len(told.finished) < ask.n
                if ask.kind == "slow" and chunks == 1:
                    await asyncio.sleep(STILL_S)
        return False

    # ---- judging ----

    def _deliver(self, ask: Ask, began: float, told: Told, index: int, floor: Mapping[str | None, int]) -> None:
        cut = index in told.cut and DEMANDS[ask.demands].get("on_stale") == "cut"
        may_abort = cut or self._aborts(ask.adapter, began)
        got = replace(self._got(ask, told, index, floor), may_abort=may_abort)
        if got.tokens or got.spans is not None:
            self.faults += self._checker.take(got)

    def _got(self, ask: Ask, told: Told, index: int, floor: Mapping[str | None, int]) -> Delivered:
        return Delivered(
            request=f"{ask.name} ({ask.kind}, choice {index})",
            worker=told.workers.get(index, ""),
            prompt=ask.prompt,
            tokens=told.tokens[index],
            spans=told.spans.get(index),
            max_tokens=ask.max_tokens,
            finish_reason=told.finished.get(index),
            floor=floor,
            adapter=ask.adapter,
            logprobs=told.logprobs[index] if index in told.finished else None,
            one_version="one_version" in DEMANDS[ask.demands],
            # An adapter that is unloaded takes its sequence with it.
            max_lag=DEMANDS[ask.demands].get("max_lag") if self._adapters.get(ask.adapter or "", True) else None,
            # The choices of a whole reply leave together; a cut choice says so itself.
            committed=0 if ask.streamed or told.error is not None or index in told.cut else told.newest,
        )

    def _check_partials(self, ask: Ask, told: Told) -> None:
        """Compares the partial choices that a stream's error carries with the tokens streamed, and takes their
        labels."""
        for partial in _partials(told.error or {}):
            index = partial["index"]
            self.faults += check_partial(self._got(ask, told, index, {}), partial["token_ids"])
            told.spans.setdefault(index, partial["weight_versions"])

    def refused(self, ask: Ask, began: float, told: Told) -> None:
        assert told.error is not None
        code = str(told.error.get("code"))
        self.trouble[code] += 1
        gone = code == "not_found" and ask.adapter is not None and not self._adapters[ask.adapter]
        demands = DEMANDS[ask.demands]
        unmet = code == "demand_unmet" and demands.get("on_stale") != "cut" and told.error.get("field") in demands
        if code not in TRANSIENT and not gone and not unmet:
            self._fault(ask, "refused", f"{code}: {told.error.get('message')}")
        elif code in OF_WORKERS and not self._excuse(None, began):
            self._fault(ask, "refused", f"{code}, and no process was killed: {told.error.get('message')}")

    def _lost(self, ask: Ask, began: float, error: httpx.TransportError) -> None:
        self.trouble[type(error).__name__] += 1
        if not self._excuse(ask.frontend, began):
            self._fault(
                ask, "lost", f"its connection broke, and its frontend lives: {type(error).__name__}: {error}"
            )

    def _fault(self, ask: Ask, kind: str, words: str) -> None:
        self.faults.append(Fault(kind, f"{ask.name} ({ask.kind})", "", "", words))


def _partials(error: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "partials" in error:
        return list(error["partials"])
    return [error["partial"]] if "partial" in error else []
