"""Clients that check every token they get."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.kill.checkpoints import Models, Wrong, check
from worker.testing.tiny_model import VOCAB_SIZE

REPLY_S = 30.0
"""The bound in seconds of a completion: a frontend holds it for up to 10 s, and may be stopped meanwhile."""
TRANSIENT = frozenset({503, 504})


Version = tuple[str, int]
"""(run, sequence)."""
Weights = tuple[str, str]
"""(label, digest)."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tokens that came with an error, and so without a word on who made them."""

    client: str
    prompt: list[int]
    tokens: list[int]
    floor: int


class Rollouts:
    """Clients that generate without an end over every frontend, and check each completion as it comes."""

    def __init__(self, models: Models, urls: Sequence[str], seed: str) -> None:
        self.wrong: list[str] = []
        self.answers: dict[str, int] = {}
        """Client → completions so far."""
        self.seen: dict[Version, set[Weights]] = {}
        """The weights that made each span so far, by the version in its label."""
        self.fragments: list[Fragment] = []
        self.trouble: Counter[str] = Counter()
        """The other errors that clients got, and their numbers."""
        self.floor = 0
        """The oldest sequence that may answer a request that begins now."""
        self.crossed = 0
        """The number of completions of two versions, which an update kept."""
        self.rolling = False
        """Two versions may be served side by side until the update is answered."""
        self._models = models
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(REPLY_S), trust_env=False)
        self._random = random.Random(seed)
        self._tasks = [
            asyncio.create_task(self._forever(f"{url}/{kind}{number}", url, kind == "stream"))
            for url in urls
            for number, kind in enumerate(("plain", "plain", "stream"))
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    async def _forever(self, client: str, url: str, stream: bool) -> None:
        self.answers[client] = 0
        while True:
            try:
                await self._one(client, url, stream)
            except httpx.TransportError as error:
                self.trouble[type(error).__name__] += 1
            except Wrong as error:
                self.wrong.append(f"{client}: {error}")
            except (KeyError, TypeError, ValueError) as error:
                self.wrong.append(f"{client}: an unreadable answer: {type(error).__name__}: {error}")
            await asyncio.sleep(self._models.pause_s)

    async def _one(self, client: str, url: str, stream: bool) -> None:
        prompt = [self._random.randrange(3, VOCAB_SIZE) for _ in range(self._random.randint(1, 4))]
        body = {
            "prompt_token_ids": prompt,
            "max_tokens": 40 if stream else 8,
            "temperature": 0,
            "return_token_ids": True,
            "stream": stream,
        }
        floor = self.floor
        tokens: list[int] = []
        spans: list[dict[str, Any]] | None = None
        finished: str | None = None
        try:
            if stream:
                async with self._http.stream("POST", f"{url}/v1/completions", json=body) as response:
                    if response.status_code != 200:
                        self._refused(client, response.status_code, await response.aread(), prompt, floor)
                        return
                    async for line in response.aiter_lines():
                        if not line.startswith("data: ") or line == "data: [DONE]":
                            continue
                        chunk = json.loads(line[len("data: ") :])
                        if "error" in chunk:
                            self._told(client, chunk["error"])
                            return
                        choice = chunk["choices"][0]
                        tokens += choice["token_ids"]
                        spans, finished = choice.get("weight_versions", spans), choice["finish_reason"]
            else:
                response = await self._http.post(f"{url}/v1/completions", json=body)
                if response.status_code != 200:
                    self._refused(client, response.status_code, response.content, prompt, floor)
                    return
                choice = response.json()["choices"][0]
                tokens, spans, finished = choice["token_ids"], choice["weight_versions"], choice["finish_reason"]
        finally:
            if spans is None and tokens:
                self.fragments.append(Fragment(client, prompt, tokens, floor))
        whole = len(tokens) == body["max_tokens"] or finished == "abort"
        check(spans is not None and whole, f"{len(tokens)} tokens, {finished}, spans {spans}")
        assert spans is not None
        self._check_spans(prompt, tokens, spans, floor)
        self.answers[client] += 1
        if not self.rolling and spans:
            # Admitted under this version: every request from now on gets it, or a newer one.
            self.floor = max(self.floor, spans[0]["sequence"])

    def _check_spans(self, prompt: list[int], tokens: list[int], spans: list[dict[str, Any]], floor: int) -> None:
        at, sequence = 0, floor
        for span in spans:
            words = f"tokens {span['start']}–{span['end']} of {len(tokens)} under {span['sequence']}"
            check(span["start"] == at, f"{words}: not from {at} on")
            check(span["sequence"] >= sequence, f"{words}: the request began when {sequence} was served")
            for position in range(span["start"], span["end"]):
                due = self._models.token(span["digest"], prompt + tokens[:position], position)
                check(tokens[position] == due, f"{words}: token {position} is {tokens[position]}, not its {due}")
            weights = (span["version"], span["digest"])
            self.seen.setdefault((span["run"], span["sequence"]), set()).add(weights)
            at, sequence = span["end"], span["sequence"]
        check(at == len(tokens), f"the spans end at {at}, the tokens at {len(tokens)}")
        self.crossed += len(spans) > 1

    def _refused(self, client: str, status: int, content: bytes, prompt: list[int], floor: int) -> None:
        error = json.loads(content)["error"]
        if partial := error.get("partial"):
            self.fragments.append(Fragment(client, prompt, partial["token_ids"], floor))
        check(status in TRANSIENT, f"HTTP {status}: {error.get('code')}: {error.get('message')}")
        self._told(client, error)

    def _told(self, client: str, error: dict[str, Any]) -> None:
        self.trouble[str(error["code"])] += 1

    def check_committed(self, committed: dict[Version, Weights]) -> None:
        """Every version that made tokens was committed, and fragments are of committed versions too."""
        for version, weights in self.seen.items():
            check(
                weights == {committed.get(version)},
                f"tokens came under {version} {weights}, committed is {committed.get(version)}",
            )
        self.seen.clear()
        digests = [(sequence, digest) for (_, sequence), (_, digest) in sorted(committed.items())]
        for fragment in self.fragments:
            sequence = fragment.floor
            for position, token in enumerate(fragment.tokens):
                context = fragment.prompt + fragment.tokens[:position]
                made_by = [
                    number
                    for number, digest in digests
                    if number >= sequence and self._models.token(digest, context, position) == token
                ]
                check(
                    made_by, f"{fragment.client}: token {position} of {fragment} is of no version from {sequence}"
                )
                sequence = min(made_by)
        self.fragments.clear()
