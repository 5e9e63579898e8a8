"""A whole cycle on the fleet, as a trainer would do it over HTTP: exit code 0, or 1 with the reason.

The fleet is ready → tokens → a new checkpoint → pause, update, resume → other tokens, labelled with the new
version on every worker → bad updates are refused, and the fleet serves on.

Runs in our image (it needs `worker.testing.tiny_model` for the checkpoint); may be run again on the same fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TOTAL_S = 300.0
"""The bound of the whole run. Most of it is waiting for torch to be imported by each worker, on as few as two cores."""
CALL_S = 60.0
"""One HTTP call; an update of the tiny model takes a second."""
POLL_S = 1.0
LEASE_S = 120.0
"""The fleet resumes by itself if this script dies while it is paused."""

PROMPT = [72, 101, 108, 108, 111]
MAX_TOKENS = 16
BASE_SEED = 1000
"""Checkpoint n is the witness model of seed 1000 + n: its greedy tokens are known, and differ for each n."""

Json = dict[str, Any]


class SmokeFailed(Exception):
    pass


def expect(holds: bool, what: str, seen: object) -> None:
    if not holds:
        raise SmokeFailed(f"expected {what}; it was: {seen}")


class Fleet:
    """The two listeners of the frontend. No call outlives `give_up`, a time of `time.monotonic`."""

    def __init__(self, rl_url: str, http_url: str, admin_key: str, api_key: str, give_up: float) -> None:
        self._keys = {rl_url: admin_key, http_url: api_key}
        self._rl_url = rl_url
        self._http_url = http_url
        self._give_up = give_up
        # Nothing here is behind a proxy, whatever http_proxy says.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(self, base: str, path: str, body: Json | None = None, with_key: bool = True) -> tuple[int, Json]:
        """The status and the reply. POST with a body, else GET. OSError when nobody answers."""
        left = self._give_up - time.monotonic()
        if left <= 0:
            raise SmokeFailed(f"{TOTAL_S:g} s are over, before {path}")
        headers = {"Content-Type": "application/json"}
        if with_key:
            headers["Authorization"] = f"Bearer {self._keys[base]}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base + path, data, headers)
        try:
            with self._opener.open(request, timeout=min(CALL_S, left)) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def rl(self, op: str, body: Json | None = None, status: int = 200) -> Json:
        """An op of the facade, which must answer this status."""
        got, reply = self.call(self._rl_url, f"/v1/rl/{op}", body)
        expect(got == status, f"HTTP {status} from {op}", f"HTTP {got} {json.dumps(reply)}")
        return reply

    def wait_ready(self, workers: int) -> None:
        seen: object = "nobody answered"
        while True:
            try:
                status, reply = self.call(self._rl_url, f"/v1/rl/ready?min_workers={workers}&wait_s=1")
                if status == 200:
                    return
                expect(status == 503, "HTTP 200 or 503 from ready", f"HTTP {status} {json.dumps(reply)}")
                seen = reply["error"]["message"]
            except OSError as error:
                seen = error
            if time.monotonic() + POLL_S > self._give_up:
                raise SmokeFailed(f"the fleet was not ready in {TOTAL_S:g} s: {seen}")
            time.sleep(POLL_S)

    def tokens(self, instance_id: str, version: Json) -> list[int]:
        """Returns this worker's text after the prompt. All of it must be labelled with the version."""
        body = {
            "prompt_token_ids": PROMPT,
            "max_tokens": MAX_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "nvext": {"instance_id": instance_id},
        }
        status, reply = self.call(self._http_url, "/v1/completions", body)
        expect(status == 200, "HTTP 200 from /v1/completions", f"HTTP {status} {json.dumps(reply)}")
        choice = reply["choices"][0]
        tokens: list[int] = choice["token_ids"]
        expect(len(tokens) == MAX_TOKENS, f"{MAX_TOKENS} token ids", tokens)
        label = {"version": version["label"], **{key: version[key] for key in ("run", "sequence", "digest")}}
        expect(
            choice["weight_versions"] == [{**label, "start": 0, "end": MAX_TOKENS}],
            f"all tokens labelled {label}",
            choice["weight_versions"],
        )
        return tokens

    def refuses_strangers(self) -> None:
        for base, path in ((self._rl_url, "/v1/rl/state"), (self._http_url, "/v1/models")):
            status, reply = self.call(base, path, with_key=False)
            expect(status == 401, f"HTTP 401 from {path} without a key", f"HTTP {status} {json.dumps(reply)}")


def publish(weights: Path, sequence: int) -> tuple[Path, str, list[int]]:
    """A new checkpoint, its digest, and the tokens that a model with these weights says after the prompt."""
    from worker.receive.staging import model_digest
    from worker.testing.tiny_model import make_witness_model, witness_next_token

    seed = BASE_SEED + sequence
    path = weights / f"sft_{sequence}"
    make_witness_model(path, seed)
    tokens = [witness_next_token(seed, PROMPT[-1])]
    while len(tokens) < MAX_TOKENS:
        tokens.append(witness_next_token(seed, tokens[-1]))
    return path, model_digest(path), tokens


def run(fleet: Fleet, workers: int, weights: Path) -> None:
    start = time.monotonic()

    def done(what: str) -> None:
        print(f"smoke: {time.monotonic() - start:6.1f} s  {what}", flush=True)

    fleet.wait_ready(workers)
    members = [row["instance_id"] for row in fleet.rl("workers")["workers"]]
    expect(len(members) == workers, f"{workers} workers", members)
    done(f"ready: {', '.join(members)}")
    fleet.refuses_strangers()
    done("both listeners want a key")

    before = fleet.rl("weight_version")["version"]
    old = {one: fleet.tokens(one, before) for one in members}
    expect(len(set(map(tuple, old.values()))) == 1, "the same tokens from every worker", old)
    done(f"{before['label']!r} (sequence {before['sequence']}) says {old[members[0]]}")

    sequence = before["sequence"] + 1
    path, digest, wanted = publish(weights, sequence)
    done(f"published {path}, {digest}")

    fleet.rl("pause", {"mode": "keep", "lease_s": LEASE_S})
    state = fleet.rl("state")
    expect(state["pause_state"] == "paused", "a paused fleet", state["pause_state"])
    label = f"sft_{sequence}"
    update = {"transport": {"backend": "filesystem", "path": str(path)}, "version": label, "digest": digest}
    reply = fleet.rl("update_weights", update)
    expect([row["status"] for row in reply["workers"]] == ["ok"] * workers, "every worker updated", reply)
    fleet.rl("resume", {})
    state = fleet.rl("state")
    expect(state["pause_state"] == "running", "a running fleet", state["pause_state"])
    done(f"paused, updated and resumed, {reply['elapsed_s']:.2f} s for the update")

    after = {"run": before["run"], "sequence": sequence, "label": label, "digest": digest}
    check_serves(fleet, workers, after, wanted)
    expect(old[members[0]] != wanted, "other tokens than before", wanted)
    done(f"{label!r} (sequence {sequence}) on {workers} of {workers} workers says {wanted}")

    for wrong in (weights / "nothing_here", Path("/etc")):
        body = {"transport": {"backend": "filesystem", "path": str(wrong)}, "version": "wrong"}
        error = fleet.rl("update_weights", body, status=400)["error"]
        done(f"refused {wrong}: {error['message']}")
    check_serves(fleet, workers, after, wanted)
    done("the fleet serves on")


def check_serves(fleet: Fleet, workers: int, version: Json, wanted: list[int]) -> None:
    """All workers hold this version, and say what its weights say."""
    fleet.wait_ready(workers)
    reply = fleet.rl("weight_version")
    expect(reply["version"] == version, f"the committed version {version}", reply["version"])
    rows = fleet.rl("state")["workers"]
    expect([row["version"] for row in rows] == [version] * workers, f"{version} on {workers} workers", rows)
    for row in rows:
        tokens = fleet.tokens(row["instance_id"], version)
        expect(tokens == wanted, f"tokens {wanted} from {row['instance_id']}", tokens)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="how many the fleet must have [1]")
    parser.add_argument("--rl-url", default="http://frontend:8002", help="[%(default)s]")
    parser.add_argument("--http-url", default="http://frontend:8000", help="[%(default)s]")
    parser.add_argument(
        "--weights", type=Path, default=Path("/weights"), help="beneath the workers' weight roots [%(default)s]"
    )
    return parser


def main() -> int:
    args = make_parser().parse_args()
    admin_key, api_key = os.environ["RL_PLANE_ADMIN_KEY"], os.environ["RL_PLANE_API_KEY"]
    fleet = Fleet(args.rl_url, args.http_url, admin_key, api_key, time.monotonic() + TOTAL_S)
    try:
        run(fleet, args.workers, args.weights)
    except (SmokeFailed, OSError) as error:
        print(f"smoke: FAILED: {error or type(error).__name__}", file=sys.stderr, flush=True)
        return 1
    print("smoke: passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
