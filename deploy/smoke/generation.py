"""Tokens in, tokens out: completions of the fleet, whole and streamed, with their labels."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deploy.smoke.checks import SmokeFailed, expect
from deploy.smoke.fleet import Fleet, Json

Route = Literal["completions", "chat/completions"]

STREAM_S = 60.0
"""The bound for a stream to come to what is waited for."""


@dataclass
class Completion:
    """One choice: its tokens, the engine's logprobs, and the label of each span of tokens."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Json] = field(default_factory=list)
    finish_reason: str | None = None
    workers: list[str] = field(default_factory=list)
    """Each worker that has made some of the tokens."""

    def add(self, choice: Json) -> None:
        """Takes in a whole choice, or the part of it in one chunk of a stream."""
        tokens, logprobs = choice.get("token_ids") or [], choice.get("logprobs") or {}
        made = logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content") or []]
        expect(len(tokens) == len(made), "a logprob for each token", choice)
        self.tokens += tokens
        self.logprobs += made
        self.spans = _joined(self.spans, choice.get("weight_versions") or [])
        self.finish_reason = choice.get("finish_reason")
        instance = choice.get("instance_id")
        if instance and instance not in self.workers:
            self.workers.append(instance)

    def check(self, count: int, version: Json, adapter: Json | None = None) -> None:
        """Checks that there are so many tokens, and that this version and this adapter have made all of them."""
        expect(len(self.tokens) == count, f"{count} tokens", self.tokens)
        expect(self.finish_reason == "length", "finish_reason length", self.finish_reason)
        label = span_label(version, adapter)
        expect(self.spans == [{**label, "start": 0, "end": count}], f"all tokens labelled {label}", self.spans)


def span_label(version: Json, adapter: Json | None = None) -> Json:
    """Returns what a span of `weight_versions` says for a committed version, and for an adapter's `name` and
    `version`."""
    label = _label_of(version)
    if adapter is not None:
        made = _label_of(adapter["version"])
        label["adapter"] = {"name": adapter["name"], **{key: made[key] for key in made if key != "run"}}
    return label


def _label_of(version: Json) -> Json:
    return {"version": version["label"], **{key: version[key] for key in ("run", "sequence", "digest")}}


def _joined(before: list[Json], found: list[Json]) -> list[Json]:
    """Returns the spans after a chunk: one chunk begins a span, and the last chunk has all of them again."""
    return found if found and found[0]["start"] == 0 else before + found


def sampling(prompt: list[int], max_tokens: int, route: Route = "completions", **more: Any) -> Json:
    """Returns the body of a request for tokens and their logprobs."""
    return {
        "prompt_token_ids": prompt,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True if route == "chat/completions" else 0,
        **more,
    }


def complete(fleet: Fleet, body: Mapping[str, Any], route: Route = "completions") -> list[Completion]:
    """Returns the choices of a whole reply."""
    status, reply = fleet.call(fleet.http_url, f"/v1/{route}", body)
    expect(status == 200, f"HTTP 200 from /v1/{route}", f"HTTP {status} {json.dumps(reply)}")
    prompt = reply["prompt_token_ids"]
    expect(prompt == body["prompt_token_ids"], "the tokens of the prompt unchanged", prompt)
    found = []
    for choice in reply["choices"]:
        found.append(Completion(prompt))
        found[-1].add(choice)
    return found


class Stream:
    """A streamed choice that is read part by part."""

    def __init__(self, fleet: Fleet, body: Mapping[str, Any], route: Route = "completions") -> None:
        self.completion = Completion(body["prompt_token_ids"])
        self.id = ""
        try:
            self._response = fleet.open(fleet.http_url, f"/v1/{route}", {**body, "stream": True})
        except urllib.error.HTTPError as error:
            with error:
                told = error.read().decode(errors="replace")
            raise SmokeFailed(f"expected a stream from /v1/{route}; it was: HTTP {error.code} {told}") from None
        self._chunks = self._read()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def read_until(self, holds: Callable[[Completion], bool], what: str) -> None:
        """Reads until the completion satisfies `holds`. SmokeFailed if the stream ends before."""
        give_up = time.monotonic() + STREAM_S
        while not holds(self.completion):
            if next(self._chunks, None) is None:
                raise SmokeFailed(f"the stream ended before {what}: {self.completion}")
            if time.monotonic() > give_up:
                raise SmokeFailed(f"{what} did not come in {STREAM_S:g} s: {self.completion.spans}")

    def read_all(self) -> Completion:
        for _ in self._chunks:
            pass
        return self.completion

    def _read(self) -> Iterator[Json]:
        for line in self._response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if not data or data.startswith(":"):
                continue
            chunk = json.loads(data)
            if "error" in chunk or not chunk.get("choices"):
                raise SmokeFailed(f"the stream ended with: {data[:2000]}")
            if not self.id:
                self.id = chunk["id"]
                expect(
                    chunk["prompt_token_ids"] == self.completion.prompt,
                    "the tokens of the prompt unchanged",
                    chunk["prompt_token_ids"],
                )
            self.completion.add(chunk["choices"][0])
            yield chunk
        raise SmokeFailed(f"the stream ended without [DONE]: {self.completion}")
