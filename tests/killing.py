"""A fleet of real processes under a supervisor, clients that check every token they get, and cases that kill, stop and
bring back any of it in the middle of an update. `test_kill_matrix.py` has the cases."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import httpx

from rl_plane.cli.children import Printer
from rl_plane.cli.supervisor import Kept, Supervisor
from rl_plane.cli.up import python
from rl_plane.demo.processes import child_environment
from rl_plane.nats_server import NatsServer
from rl_plane.record import LEASE_MARGIN_S, SERVING_LEASE_S
from tests.conftest import stop_process
from worker.engines.fake import fake_token, make_fake_model
from worker.holds import VARIABLE as HOLD_DIR
from worker.staging import model_digest
from worker.tiny_model import VOCAB_SIZE, witness_next_token

SEED = int(os.environ.get("KILL_SEED", "0"))
"""Another one makes other choices: who is the victim, who coordinates, who is held, which policy."""

WORKERS, FRONTENDS = 3, 2
START_S = 90.0
"""Three torch processes on two busy cores."""
WHOLE_S = 60.0
"""A worker that starts again imports torch and fetches; a stopped one has lost its lease and its connection."""
REACH_S = 20.0
"""From the call to the last boundary, with a busy machine."""
ANSWER_S = 40.0
"""For an update, whatever happens to it: a serving lease, a lock's, and the outage of nats-server, each twice."""
REPLY_S = 30.0
"""For a completion: a frontend holds it back up to 10 s, and may be stopped meanwhile."""
CLEAR_S = 60.0
"""For an answer to the repeated call that is neither "try again" nor a lost connection."""
SERVED_S = 20.0
"""Until each client gets tokens again."""
OUTAGE_S = SERVING_LEASE_S + LEASE_MARGIN_S + 1.5
"""Of a stopped nats-server: longer than every lease and than what clients take for a slow answer."""
SHORT_OUTAGE_S = 2.5
POLL_S = 0.02
TAIL_LINES = 40

TRANSIENT = frozenset({503, 504})
"""What a client may be told while something is down."""


class Wrong(Exception):
    """What must not happen did."""


def check(holds: object, words: str) -> None:
    if not holds:
        raise Wrong(words)


# ---- weights whose tokens tell them apart ----


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    digest: str


class Models(Protocol):
    """An engine's checkpoints, and the tokens that each of them makes."""

    @property
    def flags(self) -> Sequence[str]:
        """Of `rl-plane worker`."""

    @property
    def pause_s(self) -> float:
        """Between two requests of a client."""

    async def make(self, number: int) -> Checkpoint:
        """Number n differs from the few before it."""

    def token(self, digest: str, context: list[int], made: int) -> int:
        """The greedy next token under these weights, after a context whose last `made` tokens are the completion."""


class FakeModels:
    flags = ("--engine", "fake", "--engine-arg", "token_delay_s=0.01")
    pause_s = 0.03

    def __init__(self, root: Path) -> None:
        self._root = root

    async def make(self, number: int) -> Checkpoint:
        path = make_fake_model(self._root / f"step_{number}", number)
        return Checkpoint(path, model_digest(path))

    def token(self, digest: str, context: list[int], made: int) -> int:
        return fake_token(digest, context[: len(context) - made], made)


_MAKE_WITNESSES = (
    "import sys; from pathlib import Path; from worker.tiny_model import make_witness_model\n"
    "for seed in range(int(sys.argv[2])): make_witness_model(Path(sys.argv[1]) / f'witness_{seed}', seed)"
)


class WitnessModels:
    flags = ("--engine", "hf", "--dtype", "float32", "--device", "cpu")
    pause_s = 0.15
    seeds = 5

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seeds: dict[str, int] = {}

    async def make(self, number: int) -> Checkpoint:
        if not self._seeds:  # in a process of its own, which takes torch with it
            argv = [sys.executable, "-P", "-c", _MAKE_WITNESSES, str(self._root), str(self.seeds)]
            maker = await asyncio.create_subprocess_exec(*argv, env=child_environment(self._root))
            check(await maker.wait() == 0, "no witness checkpoints could be made")
            self._seeds = {model_digest(self._path(seed)): seed for seed in range(self.seeds)}
        path = self._path(number % self.seeds)
        return Checkpoint(path, model_digest(path))

    def _path(self, seed: int) -> Path:
        return self._root / f"witness_{seed}"

    def token(self, digest: str, context: list[int], made: int) -> int:
        return witness_next_token(self._seeds[digest], context[-1])


MODELS: dict[str, Callable[[Path], Models]] = {"fake": FakeModels, "hf": WitnessModels}


# ---- what clients see ----

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
        """Of every span that came."""
        self.fragments: list[Fragment] = []
        self.trouble: Counter[str] = Counter()
        """What else they were told, and how often."""
        self.floor = 0
        """No request that begins now may be answered by an older sequence."""
        self.crossed = 0
        """Completions of two versions: kept over an update."""
        self.rolling = False
        """Two versions may be served side by side, until the update is answered."""
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
            # Admitted under this version: whoever asks from now on gets it, or a newer one.
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


# ---- the fleet ----


@dataclass(frozen=True, slots=True)
class Answer:
    """What the caller of an update was told."""

    status: int | None
    """None: the connection was lost, or no answer came."""
    error: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> str:
        return str(self.error.get("code", "")) if self.status is not None else str(self.error["lost"])

    @property
    def version(self) -> dict[str, Any] | None:
        """The committed version that it tells of."""
        return self.body.get("version") or self.error.get("version")

    @property
    def clear(self) -> bool:
        return self.status is not None and self.status not in TRANSIENT

    def __str__(self) -> str:
        told = self.version and self.version["sequence"]
        return f"{self.status} {self.code or 'ok'} {told} {self.error.get('message', '')}".strip()


class RealFleet:
    """nats-server, two frontends and three workers, each brought back as `rl-plane up --restart` does, and clients."""

    def __init__(self, name: str, tmp: Path, engine: str) -> None:
        self.name, self.tmp = name, tmp
        self.weights = tmp / "weights"
        self.holds = tmp / "holds"
        for directory in (self.weights, self.holds, tmp / "scratch"):
            directory.mkdir(parents=True)
        self.models = MODELS[engine](self.weights)
        self.worker_ids = [secrets.token_hex(8) for _ in range(WORKERS)]
        self.frontends = [f"frontend-{number}" for number in range(FRONTENDS)]
        self.committed: dict[Version, Weights] = {}
        self.updates = 0
        self._made = 0
        self._printer = Printer()
        self._supervisor = Supervisor(self._printer, self._event, self._line)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(ANSWER_S), trust_env=False)
        self._rollouts: Rollouts | None = None
        self._nats = NatsServer(store=tmp / "store")

    # ---- its life ----

    async def start(self) -> None:
        first = await self.checkpoint()
        self._nats.start()
        url, port = self._nats.url, urlsplit(self._nats.url).port
        assert port is not None

        def again() -> NatsServer:
            self._nats = NatsServer(port=port, store=self.tmp / "store")
            return self._nats

        self._supervisor.keep_nats(self._nats, again)
        bus = ("--nats-url", url, "--namespace", "kill", "--json")
        for name in self.frontends:
            kept = self._keep(name, "frontend", *bus, "--rl-port", "0", "--http-port", "0")
            kept.on_ready = lambda kept=kept: self._keep_ports(kept, bus)  # type: ignore[misc]
        for instance_id in self.worker_ids:
            own = ("--instance-id", instance_id, "--model", str(first.path), "--weight-root", str(self.weights))
            self._keep(instance_id, "worker", *bus, *own, *self.models.flags, "--drain-s", "1")
        async with asyncio.timeout(START_S):
            for kept in self._supervisor.kept.values():
                await kept.ready.wait()
        version = (await self.whole())["version"]
        self.committed[version["run"], version["sequence"]] = (version["label"], version["digest"])
        urls = [self._facts(name)["http_url"].rstrip("/") for name in self.frontends]
        self._rollouts = Rollouts(self.models, urls, f"{SEED} {self.name}")

    def _keep(self, name: str, *arguments: str) -> Kept:
        environment = child_environment(self.tmp / "scratch") | {HOLD_DIR: str(self.holds)}
        kept = Kept(name, python("rl_plane.cli.main", *arguments), environment, restart=True)
        self._supervisor.keep(kept)
        return kept

    def _keep_ports(self, kept: Kept, bus: Sequence[str]) -> None:
        """As `up` does: the next process takes the ports that the first one found."""
        ports = [str(urlsplit(kept.facts[url]).port) for url in ("rl_url", "http_url")]
        own = ("--rl-port", ports[0], "--http-port", ports[1])
        kept.argv = python("rl_plane.cli.main", "frontend", *bus, *own)

    async def close(self) -> None:
        if self._rollouts is not None:
            await self._rollouts.close()
        await self._http.aclose()
        self._supervisor.end.set()
        self._supervisor.kill()
        await self._supervisor.stop([(list(self._supervisor.kept), 1.0)])
        self._nats.stop()
        self._printer.flush()

    @property
    def rollouts(self) -> Rollouts:
        assert self._rollouts is not None
        return self._rollouts

    # ---- its processes ----

    def _facts(self, name: str) -> dict[str, Any]:
        return self._supervisor.kept[name].facts

    def pid(self, name: str) -> int:
        """`nats`, a frontend's name or an instance id."""
        return self._nats.process.pid if name == "nats" else int(self._facts(name)["pid"])

    def kill(self, name: str) -> None:
        self._event(f"the test kills {name}")
        os.kill(self.pid(name), signal.SIGKILL)

    def stop(self, name: str) -> None:
        pid = self.pid(name)
        stop_process(pid)
        self._event(f"{name} was stopped")

    def go_on(self, name: str) -> None:
        self._event(f"{name} goes on")
        os.kill(self.pid(name), signal.SIGCONT)

    def _line(self, name: str, line: bytes, fd: int) -> None:
        with (self.tmp / f"{name}.log").open("ab") as log:
            log.write(f"{time.strftime('%H:%M:%S')} ".encode() + line + b"\n")

    def _event(self, words: str, **facts: Any) -> None:
        self._line("supervisor", f"{time.time() % 60:06.3f} {words}".encode(), 0)

    def note(self, words: str) -> None:
        self._event(words)

    def seen(self) -> str:
        if (seen := self._rollouts) is None:
            return "not started"
        return (
            f"{sum(seen.answers.values())} completions, {seen.crossed} kept over an update, {dict(seen.trouble)}"
        )

    def tail(self) -> str:
        parts = []
        for log in sorted(self.tmp.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            parts.append("\n".join([f"---- {self.name} {log.stem}", *lines]))
        return "\n".join(parts)

    # ---- what is asked of it ----

    async def get(self, frontend: str, path: str) -> dict[str, Any]:
        """TransportError or Wrong when it can't be had."""
        response = await self._http.get(
            f"{self._facts(frontend)['rl_url'].rstrip('/')}/v1/rl/{path}", timeout=15.0
        )
        check(
            response.status_code == 200, f"{frontend} {path}: HTTP {response.status_code}: {response.text[:500]}"
        )
        found: dict[str, Any] = response.json()
        return found

    async def checkpoint(self) -> Checkpoint:
        made = await self.models.make(self._made)
        self._made += 1
        return made

    async def update(self, frontend: str, body: dict[str, Any], key: str) -> Answer:
        url = f"{self._facts(frontend)['rl_url'].rstrip('/')}/v1/rl/update_weights"
        try:
            response = await self._http.post(url, json=body, headers={"Idempotency-Key": key})
            told = response.json()
        except (httpx.TransportError, ValueError) as error:
            return Answer(None, {"lost": type(error).__name__})
        if response.status_code == 200:
            # From here on: a request that begins now is answered by this version or a newer one.
            self.rollouts.floor = max(self.rollouts.floor, told["version"]["sequence"])
            return Answer(200, body=told)
        return Answer(response.status_code, told["error"])

    async def clear_answer(self, frontend: str, body: dict[str, Any], key: str) -> Answer:
        """Repeats the call under its id until it is told how the update ended."""
        give_up = time.monotonic() + CLEAR_S
        while True:
            answer = await self.update(frontend, body, key)
            self.note(f"repeated at {frontend}: {answer}")
            if answer.clear:
                return answer
            check(time.monotonic() < give_up, f"no clear answer at {frontend} in {CLEAR_S:g} s: {answer}")
            await asyncio.sleep(0.2)

    async def whole(self) -> dict[str, Any]:
        """Once every worker serves the committed version, with nothing left of any update, as every frontend tells."""
        give_up = time.monotonic() + WHOLE_S
        while True:
            try:
                states = [await self.get(name, "state?min_workers=0") for name in self.frontends]
                missing = [words for state in states for words in self._missing(state)]
                if len({json.dumps(state["version"]) for state in states}) > 1:
                    missing.append("the frontends know different versions")
                if not missing:
                    for name in self.frontends:
                        await self.get(name, f"ready?min_workers={WORKERS}")
                    return states[0]
            except (httpx.TransportError, Wrong) as error:
                missing = [f"{type(error).__name__}: {error}"]
            check(time.monotonic() < give_up, f"the fleet is not whole after {WHOLE_S:g} s: {missing}")
            await asyncio.sleep(0.1)

    def _missing(self, state: dict[str, Any]) -> list[str]:
        rows = {row["instance_id"]: row for row in state["workers"]}
        found = [] if set(rows) == set(self.worker_ids) else [f"the members are {sorted(rows)}"]
        if not state["ready"]:
            found.append("not ready")
        for instance_id, row in rows.items():
            due = {
                "status": "ok",
                "pause_state": "running",
                "version": state["version"],
                "staged": None,
                "draining": False,
                "admission": {"open": True, "reasons": []},
            }
            found += [
                f"{instance_id} has {key} {row.get(key)}" for key, value in due.items() if row.get(key) != value
            ]
        return found

    async def learn_committed(self) -> None:
        """The history, of which nothing that was told before may change."""
        told = (await self.get(self.frontends[0], "updates?limit=256"))["updates"]
        for entry in told:
            if entry["outcome"] == "committed":
                version = entry["version"]
                key, weights = (version["run"], version["sequence"]), (version["label"], version["digest"])
                check(
                    self.committed.setdefault(key, weights) == weights, f"{key} was {self.committed[key]}: {entry}"
                )

    async def outcome_of(self, update_id: str) -> list[str]:
        told = (await self.get(self.frontends[-1], "updates?limit=256"))["updates"]
        return [entry["outcome"] for entry in told if entry["update_id"] == update_id]

    # ---- holds ----

    def hold(self, point: str, instance_ids: Sequence[str], update_id: str) -> None:
        """Of this update alone: a coordinator may begin by finishing the one before."""
        for instance_id in instance_ids:
            made = self.holds / f"new.{instance_id}"
            made.write_text(update_id)
            made.rename(self.holds / f"{point}.{instance_id}")

    def release(self) -> None:
        for file in self.holds.iterdir():
            file.unlink()

    async def begun(
        self, point: str, instance_ids: Sequence[str], call: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> asyncio.Task[Answer]:
        """The update, once it stands at this point; one that finds the lock of the case before is called again."""
        give_up = time.monotonic() + REACH_S
        files = [self.holds / f"reached.{point}.{instance_id}" for instance_id in instance_ids]
        update = asyncio.create_task(call())
        while not all(file.exists() for file in files):
            check(time.monotonic() < give_up, f"{point} was not reached within {REACH_S:g} s")
            if update.done():
                check(update.result().code == "locked", f"{point} was never reached: {update.result()}")
                update = asyncio.create_task(call())
            await asyncio.sleep(POLL_S)
        return update


# ---- a case ----

Engine = Literal["fake", "hf"]
Fault = Literal["kill", "stop"]
Victim = Literal["worker", "coordinator", "nats"]
DECIDE = "decide"
"""No worker stands at it: some milliseconds after all have prepared."""
DECIDE_S = 0.015
"""From the last answer to the gate."""


@dataclass(frozen=True, slots=True)
class Case:
    engine: Engine
    fault: Fault
    victim: Victim
    point: str
    """Of `worker/holds.py`; or DECIDE."""

    def __str__(self) -> str:
        return f"{self.engine}-{self.fault}-{self.victim}-{self.point}"

    @property
    def held_at(self) -> str:
        return "prepare_update.after" if self.point == DECIDE else self.point

    @property
    def decided(self) -> bool | None:
        """The decision is written before the gate. None: who knows?"""
        return None if self.point == DECIDE else not self.point.startswith("prepare_update")


async def run_case(fleet: RealFleet, case: Case) -> None:
    chance = random.Random(f"{SEED} {case}")
    coordinator, other = chance.sample(fleet.frontends, 2)
    worker = chance.choice(fleet.worker_ids)
    policy = _policy(case, chance)
    # A rolling update comes to one worker after another.
    held = fleet.worker_ids if "barrier" not in policy and chance.random() < 0.5 else [worker]
    before = (await fleet.whole())["version"]
    weights = await fleet.checkpoint()
    label = f"{fleet.updates}-{case}"
    fleet.updates += 1
    body = {
        "transport": {"backend": "filesystem", "path": str(weights.path)},
        "version": label,
        "policy": policy,
    }
    key = uuid.uuid4().hex
    victim = {"worker": worker, "coordinator": coordinator, "nats": "nats"}[case.victim]
    fleet.note(f"== {case}: {victim} at sequence {before['sequence']}, held {held}, {coordinator}, {policy}")

    fleet.hold(case.held_at, held, key)
    update = None
    fleet.rollouts.rolling = "barrier" in policy
    try:
        update = await fleet.begun(case.held_at, held, lambda: fleet.update(coordinator, body, key))
        if case.point == DECIDE:
            fleet.release()
            await asyncio.sleep(chance.uniform(0.0, DECIDE_S))
        answer = await _strike(
            fleet, case, victim, update, chance.random() < 0.8, lambda: fleet.clear_answer(other, body, key)
        )
        told = f"the first answer was: {await _ended(update)}"
        # Only its coordinator's trouble may cost the caller the answer, only that and a lost NATS a clear one.
        check(case.victim == "coordinator" or update.result().status is not None, told)
        check(case.victim != "worker" or update.result().clear, told)
        fleet.note(f"{told}; at last: {answer}")
        after = (await fleet.whole())["version"]
    finally:
        fleet.release()
        if update is not None:
            update.cancel()
    await _check_outcome(fleet, case, before, after, [update.result(), answer], policy, worker)
    outcomes = await fleet.outcome_of(key)
    check(outcomes == ["committed" if answer.version else "aborted"], f"the history tells {outcomes}: {answer}")
    if not answer.version:  # what was undone stands in nobody's way
        again = await fleet.clear_answer(other, {**body, "version": f"{label}-again"}, uuid.uuid4().hex)
        check(again.status == 200, f"the update after it: {again}")
        after = (await fleet.whole())["version"]
    expected = (before["sequence"] + 1, weights.digest)
    check((after["sequence"], after["digest"]) == expected, f"{after} is not {expected}")
    await _check_served(fleet)


def _policy(case: Case, chance: random.Random) -> dict[str, Any]:
    policy = {
        "on_prepare_failure": chance.choice(["abort", "exclude"]),
        "pause_mode": chance.choice(["keep", "keep", "wait", "abort"]),
    }
    kind = chance.choice(["plain", "plain", "plain", "unstaged", "rolling"])
    if kind == "unstaged":
        policy["staging"] = "none"
    elif kind == "rolling" and not case.point.startswith("gate"):  # which is open from the decision on
        policy["barrier"] = "rolling"
    return policy


async def _ended(update: asyncio.Task[Answer]) -> Answer:
    done, _ = await asyncio.wait([update], timeout=ANSWER_S)
    check(done, f"the update had no answer within {ANSWER_S:g} s")
    return update.result()


async def _strike(
    fleet: RealFleet,
    case: Case,
    victim: str,
    update: asyncio.Task[Answer],
    long: bool,
    repeat: Callable[[], Awaitable[Answer]],
) -> Answer:
    """The fault, and the clear answer that came in the end. What was stopped goes on."""
    if case.fault == "kill":
        fleet.kill(victim)
        fleet.release()
        answer = await _ended(update)
        return answer if answer.clear else await repeat()
    fleet.stop(victim)
    try:
        fleet.release()
        if case.victim == "worker":
            return await _ended(update)
        if case.victim == "coordinator":  # its lease runs out, and another goes on
            return await repeat()
        await asyncio.sleep(OUTAGE_S if long else SHORT_OUTAGE_S)
    finally:
        fleet.go_on(victim)
    answer = await _ended(update)
    return answer if answer.clear else await repeat()


async def _check_outcome(
    fleet: RealFleet,
    case: Case,
    before: dict[str, Any],
    after: dict[str, Any],
    answers: Sequence[Answer],
    policy: dict[str, Any],
    worker: str,
) -> None:
    first, last = answers
    words = f"{before['sequence']} → {after['sequence']} under {policy}; answers: {first} / {last}"
    check(after["run"] == before["run"], f"another run: {words}")
    for answer in answers:
        if answer.version is not None:
            due = (after["sequence"], after["digest"])
            check((answer.version["sequence"], answer.version["digest"]) == due, f"not what was answered: {words}")
    moved = after["sequence"] - before["sequence"]
    check(moved == (1 if last.version else 0), f"not what was answered at last: {words}")
    check(not (moved and first.code == "update_aborted"), f"called undone, and committed: {words}")
    if case.decided:
        check(moved == 1 and last.status == 200, f"the decision does not stand: {words}")
    elif case.decided is False and case.victim == "worker":
        spared = policy["on_prepare_failure"] == "exclude"
        check(last.status == (200 if spared else 409), f"a worker that could not prepare: {words}")
        check(not spared or worker in last.body["excluded"], f"it is not excluded: {last.body}")


async def _check_served(fleet: RealFleet) -> None:
    """Everybody gets tokens again, and all tokens that ever came are of what was committed."""
    rollouts = fleet.rollouts
    earlier, give_up = dict(rollouts.answers), time.monotonic() + SERVED_S
    while any(rollouts.answers[client] == count for client, count in earlier.items()) and not rollouts.wrong:
        check(time.monotonic() < give_up, f"clients without tokens: {rollouts.answers}, {rollouts.trouble}")
        await asyncio.sleep(POLL_S)
    await fleet.learn_committed()
    check(not rollouts.wrong, "\n".join(rollouts.wrong[:10]))
    rollouts.check_committed(fleet.committed)


# ---- many cases ----


class Matrix:
    """Runs cases on fleets side by side, each fleet one case after the other: kill, recover, the next one. A fleet in
    which one went wrong is replaced."""

    def __init__(self, cases: Sequence[Case], tmp: Path, lanes: dict[Engine, int]) -> None:
        """`lanes`: engine → fleets."""
        self.took: dict[Case, float] = {}
        self._seen: list[str] = []
        self._tmp = tmp
        loop = asyncio.get_running_loop()
        self._results: dict[Case, asyncio.Future[None]] = {case: loop.create_future() for case in cases}
        self._lanes = []
        self._closing: list[asyncio.Task[None]] = []
        for engine, count in lanes.items():
            own = [case for case in cases if case.engine == engine]
            random.Random(SEED).shuffle(own)  # what follows on what is another thing each time
            for number in range(min(count, len(own))):
                self._lanes.append(asyncio.create_task(self._lane(f"{engine}-{number}", own[number::count])))

    async def result(self, case: Case) -> None:
        await asyncio.shield(self._results[case])

    async def close(self) -> None:
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        await asyncio.gather(*self._closing)
        for result in self._results.values():
            result.cancel()

    def report(self) -> str:
        lines = [f"{took_s:6.1f} s  {case}" for case, took_s in self.took.items()]
        return "\n".join([f"KILL_SEED={SEED}", *lines, *self._seen])

    async def _lane(self, name: str, cases: Sequence[Case]) -> None:
        fleet: RealFleet | None = None
        fleets = 0
        try:
            for case in cases:
                start = time.monotonic()
                try:
                    if fleet is None:
                        fleet = RealFleet(name, self._tmp / f"{name}.{fleets}", case.engine)
                        fleets += 1
                        await fleet.start()
                        start = time.monotonic()
                    await run_case(fleet, case)
                    self._results[case].set_result(None)
                except Exception as error:
                    words = f"{case} (KILL_SEED={SEED}): {type(error).__name__}: {error}"
                    tail = fleet.tail() if fleet is not None else ""
                    self._results[case].set_exception(Wrong(f"{words}\n{tail}\n{words}"))
                    self._close(fleet)
                    fleet = None
                finally:
                    self.took[case] = time.monotonic() - start
        finally:
            self._close(fleet)

    def _close(self, fleet: RealFleet | None) -> None:
        """In a task of its own: a lane that is cancelled doesn't leave half a fleet behind."""
        if fleet is not None:
            self._seen.append(f"{fleet.name}: {fleet.seen()}")
            self._closing.append(asyncio.create_task(fleet.close()))
