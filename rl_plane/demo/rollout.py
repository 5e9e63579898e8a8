"""Samples completions through `POST /v1/completions`: several requests at once, each for a group of one prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rl_plane.errors import DeadlineExceeded, PlaneError, Unavailable
from rl_plane.fleet.http_client import call_json

REQUEST_TIMEOUT_S = 30.0
"""A request takes well under a second. A hanging one is repeated early enough for the run to end in time."""
ATTEMPTS = 6
"""A request survives the deaths of two workers, with pauses in which the fleet notices them."""
FIRST_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """The engine's, one per token of `token_ids`."""
    spans: list[dict[str, Any]]
    """The weight version of each span of tokens, as the worker reports it."""
    instance_id: str

    def made_by(self, version: dict[str, Any]) -> bool:
        """True if this version is the label of all tokens, without a gap."""
        at = 0
        for span in self.spans:
            same = (span.get("version"), *(span.get(key) for key in ("run", "sequence", "digest")))
            if same != (version["label"], version["run"], version["sequence"], version["digest"]):
                return False
            if span.get("start") != at:
                return False
            at = span["end"]
        return at == len(self.token_ids) > 0


@dataclass(slots=True)
class GroupSampler:
    """Samples groups of completions from a frontend."""

    url: str
    """The address of the generation API, without a path."""
    model: str
    group: int
    max_tokens: int
    post: Callable[[str, dict[str, Any], str | None, float], dict[str, Any]] = call_json
    first_pause_s: float = FIRST_PAUSE_S
    repeats: int = field(default=0, init=False)
    """The number of requests that were repeated, over the whole run."""

    def groups(self, prompts: Sequence[list[int]], seed: int) -> list[list[Completion]]:
        """`group` completions of each prompt, in the prompts' order."""
        first = seed * len(prompts)
        with ThreadPoolExecutor(len(prompts), thread_name_prefix="rollout") as pool:
            waiting = [
                pool.submit(self._group, prompt, (first + i) * self.group) for i, prompt in enumerate(prompts)
            ]
            return [future.result() for future in waiting]

    def _group(self, prompt: list[int], seed: int) -> list[Completion]:
        body = {
            "model": self.model,
            "prompt_token_ids": prompt,
            "max_tokens": self.max_tokens,
            "temperature": 1.0,
            "n": self.group,
            "seed": seed,  # the i-th sample's is seed + i
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        pause_s = self.first_pause_s
        for _ in range(ATTEMPTS - 1):
            try:
                return self._ask(prompt, body)
            except (Unavailable, DeadlineExceeded):
                # A worker has died after its first token. Its tokens are dropped, and the fleet is asked again.
                self.repeats += 1
                time.sleep(pause_s)
                pause_s *= 2
        return self._ask(prompt, body)

    def _ask(self, prompt: list[int], body: dict[str, Any]) -> list[Completion]:
        reply = self.post(f"{self.url}/v1/completions", body, None, REQUEST_TIMEOUT_S)
        made = [_completion(prompt, choice) for choice in reply["choices"]]
        if len(made) != self.group:
            raise PlaneError(f"asked for {self.group} completions, got {len(made)}")
        if any(len(one.token_ids) != self.max_tokens for one in made):
            raise Unavailable("a completion was cut short")
        return made


def _completion(prompt: list[int], choice: dict[str, Any]) -> Completion:
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if len(tokens) != len(logprobs):
        raise PlaneError(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
    return Completion(prompt, tokens, logprobs, choice["weight_versions"], choice["instance_id"])
