"""The frontend's metrics: the counts, their labels, and what they are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from frontend.completions.token_timings import TokenTimings
from frontend.metrics.component_metrics import ComponentMetrics
from frontend.metrics.frontend_metrics import FrontendMetrics
from frontend.metrics.lock_and_pause import LockAndPause
from frontend.metrics.update_metrics import outcome_of
from frontend.routing.departures import KEPT, KEPT_S, Departures
from frontend.routing.fleet_status import CLOSED_REASONS
from frontend.routing.worker_work import Engine, WorkerWork
from rl_plane.bus.lock import LOCK_TTL_S
from rl_plane.commit.history import UpdateEntry
from rl_plane.errors import CanaryFailed, Unavailable
from rl_plane.membership.core import Changed, Member
from rl_plane.protocol.record import DesiredPause
from rl_plane.protocol.subjects import LOCK, PAUSE, Entry, KeyValueBucket, Subjects
from tests.support.metrics_pages import values
from tests.support.paths import ROOT
from worker.reconcile.worker_state import Reason


def parts(
    *, closed: int = 0, epoch: int = 3, sequence: int | None = None, lease: bool | None = None
) -> dict[str, Any]:
    """Stands in for the parts of a component. `closed`: workers that the reason `numerics` closes."""
    return {
        "view": SimpleNamespace(snapshot=lambda: SimpleNamespace(epoch=epoch)),
        "status": SimpleNamespace(
            by_state=lambda: {"open": 1, "closed": 1},
            closed_by_reason=lambda: {"numerics": closed},
            engine_requests=dict,
            version_lag=lambda committed: 0,
        ),
        "departures": SimpleNamespace(counts={}),
        "committed": SimpleNamespace(record=SimpleNamespace(sequence=sequence) if sequence else None),
        "lease": SimpleNamespace(holds=lambda: lease) if lease is not None else None,
        "lock_and_pause": SimpleNamespace(held_by=dict, held_s=lambda: 0.0, pause_left_s=lambda: 0.0),
        "engines": SimpleNamespace(router=SimpleNamespace(picks={"load": 3}), moves={}),
        "generation": SimpleNamespace(outcomes={}, in_flight=0, timings=TokenTimings()),
    }


NO_ENGINES: list[Engine] = []


def page(
    components: dict[str, ComponentMetrics],
    engines: list[Engine] = NO_ENGINES,
    dialects: tuple[str, ...] = (),
) -> str:
    bus: Any = SimpleNamespace(nc=SimpleNamespace(is_connected=True, stats={"reconnects": 0}))
    return FrontendMetrics(bus, {}, components, lambda: engines, dialects).text().decode()


def shown(metrics: ComponentMetrics) -> dict[str, float]:
    """The series of a frontend's page, without the label that names its only component."""
    return values(page({"engine": metrics}), "engine")


@pytest.mark.parametrize(("lease", "told"), [(True, 1.0), (False, 0.0), (None, None)])
def test_the_metrics_show_the_lease(lease: bool | None, told: float | None) -> None:
    found = shown(ComponentMetrics(**parts(lease=lease)))
    assert "rl_plane_committed_sequence" not in found
    assert found['rl_plane_generation_picks_total{by="load"}'] == 3
    assert found.get("rl_plane_serving_lease") == told


def test_the_metrics_keep_every_digit() -> None:
    given = parts(epoch=1_795_477_252_162)
    given["generation"].outcomes["ok"] = 1_234_567
    found = shown(ComponentMetrics(**given))
    assert found["rl_plane_membership_epoch"] == 1_795_477_252_162
    assert found['rl_plane_generation_requests_total{outcome="ok"}'] == 1_234_567


def test_each_components_series_have_its_name() -> None:
    given = {"policy": parts(sequence=7), "reference": parts(lease=True)}
    metrics = {name: ComponentMetrics(**one) for name, one in given.items()}
    metrics["reference"].on_op("pause", "ok")
    found = values(page(metrics))
    assert found['rl_plane_committed_sequence{component="policy"}'] == 7
    assert 'rl_plane_committed_sequence{component="reference"}' not in found
    assert found['rl_plane_serving_lease{component="reference"}'] == 1
    assert found['rl_plane_calls_total{component="reference",op="pause",outcome="ok"}'] == 1
    assert [found[f'rl_plane_workers{{component="{name}",state="open"}}'] for name in metrics] == [1, 1]
    assert found["rl_plane_nats_connected"] == 1
    text = page(metrics)
    assert text.count("# TYPE rl_plane_workers gauge") == 1


def ended(**more: Any) -> UpdateEntry:
    ok = {"status": "ok"}
    given: dict[str, Any] = {
        "outcome": "committed",
        "began_at": 100.0,
        "ended_at": 102.0,
        "transport": {"backend": "filesystem"},
        "workers": {"a": ok, "b": ok, "c": {"status": "error"}},
        "sent_bytes": 1000,
        **more,
    }
    return UpdateEntry("id", "label", **given)


def test_an_update_is_counted_by_outcome_and_transport() -> None:
    metrics = ComponentMetrics(**parts())
    metrics.updates.on_ended(ended(phases={"receive_s": 0.2, "gate_s": 0.002, "nonsense_s": 1.0}))
    metrics.updates.on_ended(ended(phases={"receive_s": 20.0}, excluded=["c"], workers_left_out=2))
    metrics.updates.on_ended(ended(outcome="aborted", transport={"backend": "x" * 100}, phases={"gate_s": 1.0}))
    metrics.updates.on_ended(ended(transport=None, sent_bytes=None))
    found = shown(metrics)
    assert found['rl_plane_updates_total{outcome="committed",transport="filesystem"}'] == 1
    assert found['rl_plane_updates_total{outcome="excluded",transport="filesystem"}'] == 1
    assert found['rl_plane_updates_total{outcome="aborted",transport="other"}'] == 1
    assert found['rl_plane_updates_total{outcome="committed",transport="none"}'] == 1
    assert sum(value for key, value in found.items() if key.startswith("rl_plane_updates_total")) == 4
    assert found['rl_plane_update_seconds_sum{outcome="committed",transport="filesystem"}'] == 2.0
    assert found['rl_plane_update_received_bytes_total{transport="filesystem"}'] == 2000 + 4000
    assert found['rl_plane_update_phase_seconds_bucket{le="0.3",phase="receive"}'] == 1
    assert found['rl_plane_update_phase_seconds_bucket{le="+Inf",phase="receive"}'] == 2
    assert found['rl_plane_update_phase_seconds_count{phase="receive"}'] == 2
    assert found['rl_plane_update_phase_seconds_sum{phase="gate"}'] == 0.002
    assert found['rl_plane_update_phase_seconds_count{phase="other"}'] == 1


@pytest.mark.parametrize(
    ("entry", "outcome"),
    [
        (ended(), "committed"),
        (ended(excluded=["c"]), "excluded"),
        (ended(error=CanaryFailed("no").to_wire()), "failed"),
        (ended(error=Unavailable("its coordinator ended").to_wire()), "unreported"),
        (ended(outcome="aborted", error=Unavailable("no").to_wire()), "aborted"),
        (replace(ended(), update_id="id/rollback"), "rollback"),
    ],
)
def test_the_outcome_of_an_update_has_one_word(entry: UpdateEntry, outcome: str) -> None:
    assert outcome_of(entry) == outcome


def test_the_metrics_show_the_canary() -> None:
    metrics = ComponentMetrics(**parts(closed=1))
    assert shown(metrics)['rl_plane_workers_closed{reason="numerics"}'] == 1
    assert "rl_plane_canary_last_difference" not in shown(metrics)
    for difference, reasons in ((0.5, {"trainer": 2, "x": 7}), (0.25, {"trainer": 1, "tie": 2})):
        canary = {"difference": difference, "mismatch_kl": difference / 2, "reasons": reasons}
        metrics.updates.on_ended(ended(canary=canary))
    found = shown(metrics)
    assert found['rl_plane_canary_failures_total{reason="tie"}'] == 2
    assert found['rl_plane_canary_failures_total{reason="trainer"}'] == 3
    assert found['rl_plane_canary_difference_bucket{le="0.3"}'] == 1
    assert found["rl_plane_canary_difference_count"] == 2
    assert (found["rl_plane_canary_last_difference"], found["rl_plane_canary_last_mismatch_kl"]) == (0.25, 0.125)
    metrics.updates.on_ended(ended(canary={"scored": 1, "failed": 0}))
    assert not any("canary_last" in key for key in shown(metrics))
    assert shown(metrics)["rl_plane_canary_difference_count"] == 2


def test_tokens_that_come_together_share_their_gap() -> None:
    given = parts()
    timings = given["generation"].timings
    timings.on_first(0.05, 1)
    timings.on_more(0.08, 4)
    timings.on_more(5.0, 1)
    for lag in (0, 2, 40):
        timings.on_end(lag)
    found = shown(ComponentMetrics(**given))
    assert found["rl_plane_generation_tokens_total"] == 6
    assert found["rl_plane_generation_first_token_seconds_count"] == 1
    assert found['rl_plane_generation_token_gap_seconds_bucket{le="0.03"}'] == 4
    assert found["rl_plane_generation_token_gap_seconds_count"] == 5
    assert found["rl_plane_generation_token_gap_seconds_sum"] == pytest.approx(5.08)
    assert found['rl_plane_generation_version_lag_bucket{le="0.0"}'] == 1
    assert found['rl_plane_generation_version_lag_bucket{le="32.0"}'] == 2
    assert found["rl_plane_generation_version_lag_count"] == 3


def test_a_strangers_words_never_become_labels() -> None:
    metrics = ComponentMetrics(**parts())
    metrics.on_op("pause", "ok")
    metrics.on_op("x" * 50, "y" * 50)
    found = {key: value for key, value in shown(metrics).items() if key.startswith("rl_plane_calls_total")}
    assert found == {
        'rl_plane_calls_total{op="pause",outcome="ok"}': 1,
        'rl_plane_calls_total{op="other",outcome="other"}': 1,
    }


def test_the_metrics_know_every_reason_that_closes_a_worker() -> None:
    assert set(CLOSED_REASONS) == set(get_args(Reason))


# ---- workers that left ----


class View:
    """A membership view that a test drives."""

    closed = False
    here: tuple[Member, ...] = ()

    def snapshot(self) -> tuple[Member, ...]:
        return self.here

    def listen(self, listener: Any) -> Any:
        self.tell = listener
        return lambda: None

    def connection_closed(self, identity: tuple[str, int]) -> bool:
        return self.closed


class Status:
    """The reasons why a worker is closed."""

    def __init__(self, *reasons: str) -> None:
        self.on_status: list[Any] = []
        self.reasons = reasons


MEMBER = Member("a" * 16, "one", "server", 7, 1, {})


@pytest.mark.parametrize(
    ("reasons", "is_closed", "after", "counted"),
    [
        (["leaving"], True, None, "ended"),
        (["updating", "engine: it hangs"], True, None, "engine"),
        ([], True, None, "connection"),
        ([], False, None, "silent"),
        ([], True, replace(MEMBER, incarnation="two"), "replaced"),
        ([], False, replace(MEMBER, client_id=8), None),
    ],
)
def test_a_worker_that_leaves_is_counted_by_its_reason(
    reasons: list[str], is_closed: bool, after: Member | None, counted: str | None
) -> None:
    view, status = View(), Status(*reasons)
    view.closed = is_closed
    departures = Departures(view, status)  # type: ignore[arg-type]
    departures.start()
    view.tell(Changed(None, MEMBER))
    for listener in status.on_status:
        listener(MEMBER.instance_id, status)
    view.tell(Changed(MEMBER, after))
    assert {reason: count for reason, count in departures.counts.items() if count} == (
        {counted: 1} if counted else {}
    )
    left = departures.recent()
    assert [one["reason"] for one in left] == ([counted] if counted else [])
    if counted == "engine":
        assert "it hangs" in left[0]["why"]


def test_the_workers_that_left_are_remembered_for_an_hour() -> None:
    now = [1000.0]
    view, status = View(), Status()
    departures = Departures(view, status, lambda: now[0])  # type: ignore[arg-type]
    departures.start()
    members = [replace(MEMBER, instance_id=f"{number:016x}", info={"host": "a"}) for number in range(KEPT + 1)]
    for member in members:
        view.tell(Changed(member, None))
        now[0] += 1
    view.here = (members[-1],)
    left = departures.recent()
    assert [one["instance_id"] for one in left] == [member.instance_id for member in reversed(members[1:])]
    assert (left[0]["ago_s"], left[0]["host"], left[0]["back"], left[1]["back"]) == (1.0, "a", True, False)
    now[0] = 1000.0 + KEPT + KEPT_S
    assert [one["instance_id"] for one in departures.recent()] == [members[-1].instance_id]


def test_a_pipeline_stage_counts_nowhere() -> None:
    view, status = View(), Status()
    departures = Departures(view, status)  # type: ignore[arg-type]
    departures.start()
    view.tell(Changed(replace(MEMBER, info={"pipeline_stage": "no weights"}), None))
    assert not any(departures.counts.values())


# ---- the lock and the pause ----


class EmptyBucket:
    """Stands in for a bus whose bucket has neither a lock nor a pause. The server's clock is 1000 s ahead."""

    name = "frontend-me"

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    async def subscribe(self, subject: str, callback: Any) -> None: ...

    def on_reconnect(self, callback: Any) -> None: ...

    async def flush(self) -> None: ...

    async def get(self, bucket: KeyValueBucket, key: str) -> None: ...

    async def server_time(self, bucket: KeyValueBucket) -> float:
        return self.clock() + 1000.0


async def followed(now: list[float]) -> LockAndPause:
    bus: Any = EmptyBucket(lambda: now[0])
    found = LockAndPause(bus, Subjects("ns", "engine").state, bus.clock)
    await found.start()
    return found


def lock_of(owner: str, sequence: int, nonce: str = "n") -> Entry:
    holder = {"owner": owner, "server_id": "s", "client_id": 1, "nonce": nonce, "fence": 1}
    return Entry(LOCK, json.dumps(holder).encode(), sequence)


@pytest.mark.parametrize(
    ("owner", "kind"),
    [("frontend-me", "this_frontend"), ("frontend-x", "another_frontend"), ("trainer", "client")],
)
async def test_the_metrics_name_the_kind_of_the_locks_holder(owner: str, kind: str) -> None:
    now = [10.0]
    found = await followed(now)
    assert (sum(found.held_by().values()), found.held_s()) == (0, 0.0)
    found.take_lock(lock_of(owner, 5))
    for renewal in range(4):
        now[0] += 1.5
        found.take_lock(lock_of(owner, 6 + renewal))
    assert {kind for kind, held in found.held_by().items() if held} == {kind}
    assert found.held_s() == 6.0
    found.take_lock(lock_of("trainer", 4))  # a late read
    found.take_lock(None)
    assert {kind for kind, held in found.held_by().items() if held} == {kind}
    now[0] += 1.0
    found.take_lock(lock_of("trainer", 10, "another"))
    assert (found.held_by()["client"], found.held_s()) == (1, 0.0)
    now[0] += LOCK_TTL_S + 0.1  # the holder died, and its expiry was not heard
    assert (sum(found.held_by().values()), found.held_s()) == (0, 0.0)


async def test_a_released_lock_is_free_at_once() -> None:
    found = await followed([10.0])
    found.take_lock(lock_of("trainer", 5))
    found.take_lock(Entry(LOCK, None, 6))
    assert not any(found.held_by().values())


async def test_the_pauses_lease_is_counted_by_the_servers_clock() -> None:
    now = [10.0]
    found = await followed(now)
    found.take_pause(Entry(PAUSE, DesiredPause(True, "keep", 1070.0).encode(), 3))
    assert found.pause_left_s() == 60.0
    now[0] = 80.0
    assert found.pause_left_s() == 0.0
    found.take_pause(Entry(PAUSE, DesiredPause(False).encode(), 4))
    assert found.pause_left_s() == 0.0


@pytest.mark.parametrize(
    ("dialects", "prefixes"),
    [
        ((), set()),
        (("prime-rl",), {"vllm:"}),
        (("sglang",), {"sglang:"}),
        (("vllm", "sglang"), {"vllm:", "sglang:"}),
    ],
)
def test_upstream_names_are_there_for_the_dialects_that_are_on(
    dialects: tuple[str, ...], prefixes: set[str]
) -> None:
    told = WorkerWork(100, 40, 2, 1, 0.25, 3, 12.5)
    engines = [
        Engine(replace(MEMBER, info={"model": "m", "kv_tokens": 4096}), told),
        Engine(replace(MEMBER, instance_id="b" * 16, info={"model": "m"}), WorkerWork(7, 9, 5, 0)),
    ]
    found = {key: value for key, value in values(page({}, engines, dialects)).items() if "model_name" in key}
    of_a = {key.partition("{")[0]: value for key, value in found.items() if "a" * 16 in key}
    of_b = {key.partition("{")[0]: value for key, value in found.items() if "b" * 16 in key}
    vllm = {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 1,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:num_preemptions_total": 3,
        "vllm:prompt_tokens_total": 100,
        "vllm:generation_tokens_total": 40,
    }
    sglang = {
        "sglang:num_running_reqs": 2,
        "sglang:num_queue_reqs": 1,
        "sglang:token_usage": 0.25,
        "sglang:max_total_num_tokens": 4096,
        "sglang:gen_throughput": 12.5,
        "sglang:prompt_tokens_total": 100,
        "sglang:generation_tokens_total": 40,
    }
    wanted = {key: value for key, value in (vllm | sglang).items() if key.partition(":")[0] + ":" in prefixes}
    assert of_a == wanted
    unknown = ("kv_cache_usage", "preemptions", "token_usage", "max_total", "gen_throughput")
    assert of_b.keys() == {key for key in wanted if not any(part in key for part in unknown)}


def test_the_docs_list_the_upstream_names_and_no_others() -> None:
    told = WorkerWork(100, 40, 2, 1, 0.25, 3, 12.5)
    engines = [Engine(replace(MEMBER, info={"kv_tokens": 4096}), told)]
    found = values(page({}, engines, ("vllm", "sglang")))
    names = {name for key in found if ":" in (name := key.partition("{")[0])}
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"`((?:vllm|sglang):\w+)`", text)) == names


def test_the_status_of_a_worker_may_lack_the_load_of_its_engine() -> None:
    wire = {"running": 6, "waiting": 7, "tokens_made": 3, "prompt_tokens": 4}
    assert WorkerWork.from_wire({**wire, "engine_load": None}) == WorkerWork(4, 3, 6, 7)
    load = {"running": 1, "waiting": 2, "kv_usage": 0.5, "preemptions": None, "tokens_per_s": None}
    assert WorkerWork.from_wire({**wire, "engine_load": load}) == WorkerWork(4, 3, 1, 2, 0.5)
