"""The demo's trainer, which runs in a process of its own: `python -P -m rl_plane.demo.trainer`.

It knows the fleet by two URLs only. It prints its events as JSON lines: `{"ready": "trainer"}` at the start, then
`{"event": "phase", "step": n, "phase": …}`, `{"event": "step", …}` (a StepRecord), `{"event": "done"}`, or
`{"event": "failed", "reason": …}`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_plane.cli.output import say_ready
from rl_plane.demo.grpo import group_advantages
from rl_plane.demo.policy import Policy
from rl_plane.demo.reward import reward
from rl_plane.demo.rollout import Completion, GroupSampler
from rl_plane.demo.story import StepRecord
from rl_plane.errors import Conflict, PlaneError, Unavailable
from rl_plane.fleet.http_client import call_facade, call_json
from rl_plane.protocol.canary import default_canary
from rl_plane.publish import WeightPublisher

PROMPTS = 8
"""The number of requests at once: every worker has some."""
GROUP = 8
MAX_TOKENS = 32
PROMPT_TOKENS = (4, 12)
"""Shortest and longest prompt."""
PREFIX = "step_"
"""The beginning of each version's label."""
CALL_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 240.0
"""Loading torch and a model on two busy cores takes about 15 s per worker; vLLM and SGLang do so three times."""
ATTEMPTS = 4
"""The number of times that a version is published, if a worker that joins or dies undoes its update."""
PAUSE_S = 0.3


def emit(event: str, **facts: Any) -> None:
    """Prints one event for the parent process."""
    print(json.dumps({"event": event, **facts}), flush=True)


def make_prompts(rng: random.Random, vocab: int) -> list[list[int]]:
    """Prompts of random tokens: the reward depends on the completion only."""
    return [[rng.randrange(vocab) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(PROMPTS)]


def rolled_out(groups: list[list[Completion]], version: dict[str, Any]) -> dict[str, Any]:
    """The part of a StepRecord that the completions give."""
    flat = [one for group in groups for one in group]
    return {
        "version": version["label"],
        "reward": sum(reward(one.token_ids) for one in flat) / len(flat),
        "completions": len(flat),
        "mixed_version_completions": sum(not one.made_by(version) for one in flat),
        "by_worker": dict(Counter(one.instance_id for one in flat)),
    }


def wait_ready(url: str, workers: int) -> None:
    """Waits until so many workers serve the committed version. Unavailable if they don't within READY_TIMEOUT_S."""
    body = {"min_workers": workers, "wait_s": READY_TIMEOUT_S}
    call_facade(url, None, "ready", body, READY_TIMEOUT_S + CALL_TIMEOUT_S)


def published(publisher: WeightPublisher, label: str, pause_s: float = PAUSE_S) -> tuple[dict[str, Any], int]:
    """Publishes a version. Returns the update's reply, and how often the update was repeated."""
    for repeats in range(ATTEMPTS - 1):
        try:
            return publisher.publish(label).result(), repeats
        except (Conflict, Unavailable):
            time.sleep(pause_s)
    return publisher.publish(label).result(), ATTEMPTS - 1


def train(args: argparse.Namespace) -> None:
    """Trains for `args.steps` steps, and emits an event for each phase and step."""
    policy = Policy(args.model)
    wait_ready(args.rl_url, args.workers)
    name = call_json(f"{args.http_url}/v1/models", None, None, CALL_TIMEOUT_S)["data"][0]["id"]
    rollout = GroupSampler(args.http_url, name, GROUP, MAX_TOKENS)
    rng = random.Random(args.seed)
    version = call_facade(args.rl_url, None, "weight_version", {}, CALL_TIMEOUT_S)["version"]
    update_repeats = 0
    canary = default_canary(policy.vocab_size).sequences
    with WeightPublisher(
        policy.model, args.rl_url, transport="filesystem", root=args.weights, canary=canary
    ) as publisher:
        for step in range(1, args.steps + 1):
            if step == args.whole_fleet_from:
                emit("phase", step=step, phase="waiting for the whole fleet")
                wait_ready(args.rl_url, args.workers)
            emit("phase", step=step, phase="rolling out")
            start = time.monotonic()
            groups = rollout.groups(make_prompts(rng, policy.vocab_size), args.seed * 100_000 + step)
            rollout_s = time.monotonic() - start
            sampled = rolled_out(groups, version)
            if sampled["mixed_version_completions"]:
                wrong = next(one for group in groups for one in group if not one.made_by(version))
                print(f"step {step}: committed {version}, but a completion says {wrong.spans}", file=sys.stderr)
            emit("phase", step=step, phase="learning")
            start = time.monotonic()
            flat = [one for group in groups for one in group]
            lesson = policy.learn(
                [one.prompt for one in flat],
                [one.token_ids for one in flat],
                [one.logprobs for one in flat],
                [gain for group in groups for gain in group_advantages([reward(one.token_ids) for one in group])],
            )
            learn_s = time.monotonic() - start
            emit("phase", step=step, phase="updating the fleet")
            start = time.monotonic()
            reply, repeats = published(publisher, f"{PREFIX}{step}")
            update_s = time.monotonic() - start
            version, scored = reply["version"], reply.get("canary") or {}
            update_repeats += repeats
            record = StepRecord(
                step=step,
                **sampled,
                max_logprob_diff=lesson.max_logprob_diff,
                canary_difference=scored.get("difference"),
                mismatch_kl=scored.get("mismatch_kl"),
                workers=sum(row["status"] == "ok" for row in reply["workers"]),
                rollout_s=rollout_s,
                learn_s=learn_s,
                update_s=update_s,
                repeats=rollout.repeats + update_repeats,
                committed=version["label"],
                digest=version["digest"],
            )
            emit("step", **asdict(record))
    emit("done")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rl_plane.demo.trainer", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="checkpoints are written here")
    parser.add_argument("--http-url", required=True, help="the generation API")
    parser.add_argument("--rl-url", required=True, help="the facade")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="how many make the whole fleet")
    parser.add_argument("--whole-fleet-from", type=int, default=0, help="before this step, wait for all of them")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    say_ready(True, "trainer", "")
    try:
        train(parse(argv))
    except PlaneError as error:
        emit("failed", reason=f"{error.facts.get('unknown_code', error.code)}: {error.message}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
