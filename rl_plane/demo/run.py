"""`rl-plane demo` runs a fleet and a trainer, kills a worker, starts a new one, and checks the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_plane.cli.output import say
from rl_plane.cli.settings import DEMO_STEPS
from rl_plane.demo.fleet import DemoFleet
from rl_plane.demo.report import FLEET, MEAN_OVER, make_report, write_picture, write_report
from rl_plane.demo.reward import REWARD_TEXT
from rl_plane.demo.story import StepRecord, Story, WorkerEnd
from rl_plane.demo.table import LiveTable
from rl_plane.errors import DeadlineExceeded, InvalidRequest, PlaneError

DEADLINE_S = 225.0
"""The bound in seconds of a run of DEMO_STEPS with `hf`. A run takes a minute or two; with the stop and the picture it
stays below four minutes."""
ENGINE_DEADLINE_S = 600.0
"""The bound in seconds of such a run with another engine. vLLM and SGLang take most of a minute to start, at the
beginning and after the kill."""
KILL_AT = 0.4
WHOLE_FLEET_FROM = 0.75
"""Two shares of the steps. After the share KILL_AT the demo kills a worker. After the share WHOLE_FLEET_FROM the
trainer waits for the new worker, so that this worker serves some steps even if processes start slowly."""
KILL_PATIENCE = 3
"""The most steps that the demo waits until the worker has requests in flight, before it kills the worker."""
BUSY_POLL_S = 0.01
POLL_S = 0.1
INTERRUPTED = 130
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NEEDED = ("torch", "transformers", "safetensors", "blake3", "xxhash", "starlette", "uvicorn", "matplotlib")


def deadline_s(steps: int, engine: str) -> float:
    """The bound in seconds of a run. More steps than DEMO_STEPS take longer in proportion."""
    return (DEADLINE_S if engine == "hf" else ENGINE_DEADLINE_S) * max(1.0, steps / DEMO_STEPS)


class Demo:
    """One run: takes in the trainer's events, and kills a worker in the middle."""

    def __init__(self, fleet: DemoFleet, story: Story, table: LiveTable, deadline_s: float) -> None:
        self._fleet, self._story, self._table = fleet, story, table
        self._deadline_s = deadline_s
        self._kill_step = max(1, round(KILL_AT * story.planned))
        self._phase: tuple[int, str] = (0, "")
        self._served: set[str] = set()

    async def run(self) -> None:
        """Ends after the trainer's last event. PlaneError if a process fails, or the deadline passes."""
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._steps()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"step {self._phase[0]} ({self._phase[1] or 'waiting for the workers'}) was not done "
                f"{self._deadline_s:g} s after the start"
            ) from error
        self._story.workers = [_worker_end(row) for row in await self._fleet.members()]

    async def _steps(self) -> None:
        whole_fleet_from = math.ceil(WHOLE_FLEET_FROM * self._story.planned)
        arguments = ["--steps", str(self._story.planned), "--workers", str(FLEET)]
        await self._fleet.start(FLEET, [*arguments, "--whole-fleet-from", str(whole_fleet_from)])
        while True:
            with contextlib.suppress(TimeoutError):
                poll_s = BUSY_POLL_S if self._kill_is_due() else POLL_S
                if not self._follow(await self._fleet.unless_failed(self._fleet.events.get(), poll_s)):
                    return
            if self._kill_is_due():
                await self._kill()

    def _follow(self, event: dict[str, Any]) -> bool:
        """Takes in one event of the trainer. False: it was the last one."""
        kind = event.pop("event")
        if kind == "failed":
            raise PlaneError(f"the trainer: {event['reason']}")
        if kind == "phase":
            self._phase = (event["step"], event["phase"])
            self._table.phase(*self._phase)
        elif kind == "step":
            self._take(StepRecord(**event))
        return bool(kind != "done")

    def _take(self, record: StepRecord) -> None:
        self._story.steps.append(record)
        self._table.step(record)
        for key in set(self._story.joined) - self._served:
            self._served.add(key)
            self._table.note(f"      + worker {key} has joined, and serves {record.version}")

    def _kill_is_due(self) -> bool:
        step, phase = self._phase
        return not self._story.killed and step >= self._kill_step and phase == "rolling out"

    async def _kill(self) -> None:
        victim = self._fleet.workers[0]
        busy = await self._fleet.in_flight(victim)
        if busy == 0 and self._phase[0] < self._kill_step + KILL_PATIENCE:
            return
        self._fleet.kill_worker(victim)
        self._story.killed.append(victim)
        self._story.killed_at = self._phase[0]
        self._story.killed_in_flight = busy
        newcomer = self._fleet.add_worker()
        self._story.started.append(newcomer)
        self._table.note(f"      - worker {victim} is killed with {busy} requests in flight; {newcomer} starts")


def _worker_end(row: dict[str, Any]) -> WorkerEnd:
    version = row.get("version") or {}
    return WorkerEnd(row["instance_id"], version.get("label"), version.get("digest"))


class Interrupted(PlaneError):
    """Ctrl-C, SIGTERM or a closed terminal."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM or a closed terminal cancels the running task, and ends as Interrupted."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    heard: list[signal.Signals] = []

    def hear(number: signal.Signals) -> None:
        if not heard:  # a second signal must not stop the clearing up
            heard.append(number)
            task.cancel()

    for number in ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores one
            loop.add_signal_handler(number, hear, number)
    try:
        yield
    except asyncio.CancelledError:
        if not heard:
            raise
        raise Interrupted(f"interrupted by {heard[0].name}") from None


def _check(steps: int, model: Path | None) -> None:
    if steps < 2 * MEAN_OVER:
        raise InvalidRequest(
            f"--steps {steps}: the report compares {MEAN_OVER} steps at each end",
            field="steps",
            fix=f"at least {2 * MEAN_OVER}",
        )
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidRequest(f"not installed: {', '.join(missing)}", fix="pip install 'rl-plane[demo]'")
    if model is not None and not (model / "config.json").is_file():
        raise InvalidRequest(
            f"{model} has no config.json", field="model", fix="give a Hugging Face model directory"
        )


def _fresh(out: Path) -> Path:
    """The folder for the logs. Removes the files of an earlier run from `out`, and no others."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("report.json", "reward.png"):
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(out / "logs", ignore_errors=True)
        (out / "logs").mkdir()
    except OSError as error:
        raise InvalidRequest(f"can't write to {out}: {error.strerror}", field="out", fix="--out DIR") from error
    return out / "logs"


def _summary(report: dict[str, Any], out: Path) -> str:
    update = report["update_seconds"]
    return (
        f"reward ({REWARD_TEXT}): {report['reward_first']:.3f} -> {report['reward_last']:.3f} "
        f"in {report['steps']} steps\n"
        f"{report['completions']} completions, each labelled with the committed version; logprobs agree within "
        f"{report['max_logprob_diff']:.1e}\n"
        f"canary of the trainer's model in the engines after each update: log probabilities agree within "
        f"{report['max_canary_difference']:.1e}, mismatch_kl {report['max_mismatch_kl']:.1e} at most\n"
        f"weight updates: {update['median']:.2f} s median, {update['max']:.2f} s at most; worker killed at step "
        f"{report['killed_at_step']}, a new one served from step {report['joined_at_step']}\n"
        f"{len(report['workers'])} workers at {report['version']} {report['digest']}\n"
        f"done in {report['elapsed_seconds']:.0f} s: {out / 'report.json'}, {out / 'reward.png'}"
    )


def run(*, out: Path, steps: int, seed: int, model: Path | None, engine: str) -> int:
    """The exit code. Wrong arguments are an InvalidRequest; a later failure is one line."""
    start = time.monotonic()
    _check(steps, model)
    logs = _fresh(out)
    story, trouble, code = Story(steps), "", 1
    say(f"starting nats-server, a frontend, {FLEET} {engine} workers and a trainer; logs in {logs}")
    try:
        asyncio.run(_run(story, logs, model, seed, engine))
    except PlaneError as error:
        trouble = error.message
        code = INTERRUPTED if isinstance(error, Interrupted) else 1
    story.elapsed_s = time.monotonic() - start
    report = make_report(story, trouble)
    write_report(report, out / "report.json")
    if story.steps:
        write_picture(report, out / "reward.png")
    if report["ok"]:
        say(_summary(report, out))
        return 0
    print(f"rl-plane demo failed: {'; '.join(report['failures'])} (logs in {logs})", file=sys.stderr)
    return code


async def _run(story: Story, logs: Path, model: Path | None, seed: int, engine: str) -> None:
    table = LiveTable(sys.stdout, story.planned)
    fleet = DemoFleet(logs, model, seed, engine)
    try:
        with interruptible():
            await Demo(fleet, story, table, deadline_s(story.planned, engine)).run()
    finally:
        table.end()
        await fleet.stop()
