"""SyncRlClient against a real nats-server and fake workers in a process of their own."""

from __future__ import annotations

import _thread
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rl_plane._util.processes import die_with_parent
from rl_plane.bus.server import NatsServer
from rl_plane.errors import BusUnreachable, DeadlineExceeded, InvalidRequest, NotFound, NoWorkers, PlaneError
from rl_plane.protocol.update_requests import UpdatePolicy
from rl_plane.sync import CallBounds, SyncRlClient, call_bound_s
from tests.conftest import Plane
from worker.engines.fake.adapter import make_fake_model
from worker.engines.fake.fake_model import FIRST_TOKEN

WORKERS = 2
BOUND_S = 30.0
THREADS = 8
"""No more than a worker tokenizes at once."""
ANSWERS_TOGETHER = f"""
import asyncio
from worker.engines.fake.adapter import FakeEngine

alone, everyone = FakeEngine.tokenize, asyncio.Barrier({THREADS})

async def tokenize(self, body):
    await everyone.wait()
    return await alone(self, body)

FakeEngine.tokenize = tokenize
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def nats_url(root: Path) -> Iterator[str]:
    server = NatsServer()
    server.start()
    argv = [
        "worker",
        "--engine",
        "fake",
        "--copies",
        str(WORKERS),
        "--model",
        str(make_fake_model(root / "base", 0)),
    ]
    argv += ["--weight-root", str(root), "--nats-url", server.url, "--json"]
    workers = subprocess.Popen(
        [sys.executable, "-P", "-m", "rl_plane.cli.main", *argv],
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    assert workers.stdout is not None
    assert len(json.loads(workers.stdout.readline())["instance_ids"]) == WORKERS
    yield server.url
    workers.kill()
    workers.wait()
    workers.stdout.close()
    server.stop()


@pytest.fixture
def fleet(nats_url: str) -> Iterator[SyncRlClient]:
    with SyncRlClient.connect(nats_url) as fleet:
        yield fleet


def test_a_trainers_loop_pauses_updates_and_resumes_the_fleet(fleet: SyncRlClient, root: Path) -> None:
    snapshot = fleet.wait_for(WORKERS)
    assert len(snapshot) == WORKERS
    assert fleet.list_workers().epoch == snapshot.epoch
    for step in (1, 2):
        path = make_fake_model(root / f"step_{step}", seed=step)
        assert fleet.pause()["status"] == "ok"
        policy = UpdatePolicy(keep_pause=True)
        reply = fleet.update_weights({"backend": "filesystem", "path": str(path)}, f"step_{step}", policy=policy)
        assert reply["version"]["label"] == f"step_{step}"
        assert fleet.state()["pause_state"] == "paused"
        fleet.resume()
        state = fleet.state(epoch=snapshot.epoch)
        assert (state["pause_state"], state["applied_weight_version"]) == ("running", f"step_{step}")
    assert [row["engine"] for row in fleet.workers()["workers"]] == ["fake"] * WORKERS


def test_the_typed_ops_reach_the_fleet_and_give_its_answers(fleet: SyncRlClient, root: Path) -> None:
    first = fleet.wait_for(WORKERS).members[0].instance_id
    began = fleet.new_run(request_id="typed")
    assert fleet.new_run(request_id="typed")["version"] == began["version"], "a repeated call has the first answer"
    path = make_fake_model(root / "typed", seed=7)
    made = fleet.update_weights({"backend": "filesystem", "path": str(path)}, "typed", step=7)
    assert fleet.weight_version()["version"] == made["version"]
    assert fleet.rollback(sequence=began["version"]["sequence"])["version"]["digest"] == began["version"]["digest"]
    newest, before = fleet.updates(limit=2)["updates"]
    assert (newest["rollback"]["sequence"], before["step"]) == (began["version"]["sequence"], 7)
    with pytest.raises(NotFound):
        fleet.rollback("never made")
    fleet.disable([first])
    assert not next(row for row in fleet.state()["workers"] if row["instance_id"] == first)["admission"]["open"]
    fleet.enable([first])
    assert fleet.ready(min_workers=WORKERS, wait_s=BOUND_S)["ready"] is True
    assert len({row["ranks"][0]["checksum"] for row in fleet.check_weights()["workers"]}) == 1
    assert fleet.describe(workers=[first], manifest_from=0)["workers"][0]["manifest"]
    seen = fleet.describe(workers=[first], host=True, weight_roots=[str(path)])["workers"][0]["host"]
    assert seen is not None
    assert str(path) in [one["path"] for one in seen["roots"]]
    assert fleet.liveness()["alive"] is True
    assert fleet.flush_cache()["status"] == "ok"
    assert fleet.abort_requests()["waiting"] == 0


def test_two_calls_prepare_and_complete_an_update(fleet: SyncRlClient, root: Path) -> None:
    fleet.wait_for(WORKERS)
    transport = {"backend": "filesystem", "path": str(make_fake_model(root / "two", seed=8))}
    prepared = fleet.prepare_weights_update(transport, "two")
    assert fleet.complete_weights_update(prepared["update_id"])["version"]["label"] == "two"
    again = fleet.prepare_weights_update(transport, "three")
    assert fleet.abort_weights_update()["update_id"] == again["update_id"]
    assert fleet.state()["applied_weight_version"] == "two"


def test_call_asks_one_worker_and_call_all_asks_each(fleet: SyncRlClient) -> None:
    first = fleet.wait_for(WORKERS).members[0].instance_id
    assert fleet.call(first, "liveness").body["alive"] is True
    assert fleet.call(first, "flush_cache", timeout_s=5.0).status == "ok"
    out = fleet.call_all("describe")
    assert [row.body["engine"] for row in out.rows] == ["fake"] * WORKERS
    assert len(fleet.call_all("describe", workers=[first]).rows) == 1


def test_errors_are_those_of_the_async_client(fleet: SyncRlClient) -> None:
    with pytest.raises(InvalidRequest):
        fleet.run("fly")
    with pytest.raises(InvalidRequest):
        fleet.pause("gently")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        fleet.run("pause", {"lease_s": float("nan")})
    with pytest.raises(NotFound):
        fleet.call("0" * 16, "state")
    with pytest.raises(NotFound):
        fleet.state(component="unknown")
    with pytest.raises(NoWorkers):
        fleet.wait_for(99, timeout_s=0.1)
    assert fleet.state()["status"] == "ok"


def test_a_call_is_cut_off_at_its_bound(fleet: SyncRlClient) -> None:
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="state did not end within"):
        fleet.run("state", {"min_workers": 99, "wait_s": 60}, timeout_s=0.2)
    assert time.monotonic() - start < 20
    assert fleet.state()["status"] == "ok"


def test_one_client_answers_many_threads(plane: Plane) -> None:
    """The worker answers a call only when the calls of all threads are under way, and each thread gets its own
    answer."""
    one = plane.spawn(patch=ANSWERS_TOGETHER)
    prompts = [f"prompt {number}" for number in range(8 * THREADS)]
    with (
        SyncRlClient.connect(plane.url, plane.namespace, plane.component) as fleet,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        replies = pool.map(lambda prompt: fleet.call(one.instance_id, "tokenize", {"prompt": prompt}), prompts)
        assert [reply.body["tokens"] for reply in replies] == [
            [FIRST_TOKEN + byte for byte in prompt.encode()] for prompt in prompts
        ]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restores SIGINT, which a shell's background processes ignore."""
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, was)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_cancels_the_call_and_is_raised(fleet: SyncRlClient) -> None:
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fleet.wait_for(99, timeout_s=60.0)
    assert time.monotonic() - start < 20
    timer.join()
    assert fleet.state()["status"] == "ok"


def test_close_ends_waiting_calls_and_a_second_one_does_nothing(nats_url: str) -> None:
    before = threading.active_count()
    fleet = SyncRlClient.connect(nats_url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fleet.wait_for, 99, 60.0)
        time.sleep(0.1)  # it waits by now; were it not so, it would raise the same
        fleet.close()
        with pytest.raises(BusUnreachable, match="has been closed"):
            waiting.result(BOUND_S)
    fleet.close()
    with pytest.raises(BusUnreachable, match="has been closed"):
        fleet.state()
    assert threading.active_count() <= before


def test_a_call_that_comes_while_it_is_closed_ends(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is handed to the loop when that is about to stop, and never begins."""
    loop = asyncio.new_event_loop()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", lambda: loop)
        fleet = SyncRlClient.connect(nats_url)
    (thread,) = (one for one in threading.enumerate() if one.name == "rl-plane-sync")
    hand_over = loop.call_soon_threadsafe
    stopping, handed_over = threading.Event(), threading.Event()
    closing = threading.Thread(target=fleet.close)

    def handing_over(call: Callable[..., object], *arguments: Any) -> None:
        if call == loop.stop:
            hand_over(call)
            stopping.set()
            assert handed_over.wait(BOUND_S)
        elif threading.current_thread() is threading.main_thread():
            closing.start()
            assert stopping.wait(BOUND_S)
            thread.join(BOUND_S)
            hand_over(call, *arguments)
            handed_over.set()
        else:
            hand_over(call, *arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", handing_over)
    with pytest.raises(BusUnreachable, match="has been closed"):
        fleet.list_workers()
    closing.join(BOUND_S)
    assert loop.is_closed()


def test_a_sync_client_reports_that_no_server_answers() -> None:
    with pytest.raises(PlaneError, match="no NATS server answers"):
        SyncRlClient.connect("nats://127.0.0.1:9")


def test_a_program_that_forgets_to_close_ends_all_the_same(nats_url: str) -> None:
    code = "import sys, rl_plane.sync as sync; print(sync.SyncRlClient.connect(sys.argv[1]).state()['status'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, nats_url], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.parametrize(
    ("op", "body", "low", "high"),
    [
        ("state", {}, 10, 60),
        ("state", {"wait_s": 100}, 100, 160),
        ("update_weights", {"policy": {"prepare_timeout_s": 1000}}, 1120, 1200),
        ("update_weights", {"policy": {"prepare_timeout_s": float("nan")}}, 300, 600),
        ("update_weights", {"policy": "x"}, 300, 600),
        ("update_weights", {"policy": {"barrier": "rolling", "commit_timeout_s": 10}}, 2560, 3200),
        ("load_lora_adapter", {}, 420, 600),
        ("unload_lora_adapter", {}, 420, 600),
        ("new_run", {}, 420, 600),
        ("receive_weights_part", {"timeout_s": 1000}, 2000, 2400),
        ("enable", {}, 10, 60),
        ("fly", {}, 10, 60),
    ],
)
def test_every_call_has_a_bound(op: str, body: dict[str, object], low: float, high: float) -> None:
    assert low <= call_bound_s(op, body) <= high


def test_a_prepared_update_is_completed_with_the_same_bounds() -> None:
    bounds = CallBounds()
    assert bounds.of("complete_weights_update", {}) > 15_000  # another caller may have prepared a rolling update
    bounds.of("prepare_weights_update", {"policy": {"barrier": "strict"}})
    assert bounds.of("complete_weights_update", {}) < 900
    patient: dict[str, object] = {"policy": {"prepare_timeout_s": 2000}}
    assert 2000 < bounds.of("prepare_weights_update", patient) < 4000
    assert bounds.of("complete_weights_update", {}) > 4000  # so long it waits for the lock, too
    assert bounds.of("update_weights", {}) < 600
    bounds.of("prepare_weights_update", {"component": "other"})  # another thread's
    bounds.of("prepare_weights_update", {})  # the fleet refuses it: an update is prepared
    assert bounds.of("complete_weights_update", {}) > 4000
    assert bounds.of("complete_weights_update", {"component": "other"}) < 1500
