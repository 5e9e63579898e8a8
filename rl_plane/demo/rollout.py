"""Rolling out through `POST /v1/completions`: several requests at once, each a group of samples of one prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rl_plane.errors import DeadlineExceeded, PlaneError, Unavailable
from rl_plane.fleet.http_client import call_json

REQUEST_TIMEOUT_S = 30.0
"""A request takes well under a second; one that hangs is repeated, and the run still ends in time."""
ATTEMPTS = 6
"""Two workers can die under a request before it is given up, with pauses for the fleet to notice in between."""
FIRST_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Completion:
    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """The engine's, one per token of `token_ids`."""
    spans: list[dict[str, Any]]
    """Which weight version made which tokens, as the worker told."""
    instance_id: str

    def made_by(self, version: dict[str, Any]) -> bool:
        """Are all of its tokens, without a gap, labelled with this version?"""
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
class Rollout:
    """`groups(prompts)` gives `group` completions of each prompt, in the prompts' order."""

    url: str
    """Of the generation API, without a path."""
    model: str
    group: int
    max_tokens: int
    post: Callable[[str, dict[str, Any], str | None, float], dict[str, Any]] = call_json
    repeats: int = field(default=0, init=False)
    """Requests that had to be asked again, over the whole run."""

    def groups(self, prompts: Sequence[list[int]], seed: int) -> list[list[Completion]]:
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
        pause_s = FIRST_PAUSE_S
        for _ in range(ATTEMPTS - 1):
            try:
                return self._ask(prompt, body)
            except (Unavailable, DeadlineExceeded):
                # A worker died after its first token: what it said is thrown away, and the fleet asked again.
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
