"""The pure part of `rl-plane explain`: from facts to causes, waits, ends and fixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_plane.cli.explain import read_facts
from rl_plane.cli.explain.explanation import explain, identify
from rl_plane.cli.explain.finding import Finding
from rl_plane.cli.explain.findings import findings
from rl_plane.cli.explain.wording import GONE, STOPPED, process_of
from rl_plane.errors import InvalidRequest, NotFound
from tests.support.explained_facts import (
    NATS,
    NOW,
    ONE,
    TWO,
    ended_update,
    known,
    left_worker,
    running_update,
    silent_row,
    worker_row,
)
from tests.support.small_facade import starting_row


def only(facts: Any) -> Finding:
    (found,) = findings(facts)
    return found


def test_a_fleet_that_is_well_has_no_finding() -> None:
    facts = known(worker_row(ONE), worker_row(TWO), updates=[ended_update()])
    assert findings(facts) == []
    found = explain(facts, None)
    assert not found.findings
    assert found.lines() == ["ready, running, 2 of 2 workers serve version 3 (step_3); nothing is wrong"]


def test_a_stopped_trainer_is_named_with_the_signal_that_continues_it() -> None:
    facts = known(worker_row(), update=running_update(), processes={("gpu3", 4711): STOPPED})
    found = only(facts)
    assert found.name == "update u-17 (step_4)"
    assert found.waits_for == "the trainer's bytes, since 19 s (2 of 2 workers)"
    assert "train.py@gpu3:4711 at 10.0.0.7, whose process is stopped by a signal" in found.cause
    assert found.until == "120 s after the trainer's last call, then it is aborted"
    assert found.fix == "`kill -CONT 4711` on gpu3 continues it. `rl-plane abort u-17` ends it"


def test_a_trainer_on_another_machine_is_looked_at_there() -> None:
    found = only(known(worker_row(), update=running_update()))
    assert found.fix.startswith("on gpu3 run `ps -o stat,args -p 4711`")
    unnamed = only(known(worker_row(), update=running_update(caller="10.0.0.7")))
    assert unnamed.fix.startswith("see whether the trainer runs")


def test_a_prepared_update_may_be_completed_or_aborted() -> None:
    update = running_update(phase="prepared", waits_for="the trainer's next call (complete_weights_update or …)")
    found = only(known(worker_row(), update=update, processes={("gpu3", 4711): GONE}))
    assert "start the trainer again" in found.fix
    assert "`rl-plane abort u-17` ends it" in found.fix
    assert "`rl-plane complete u-17` commits it" in found.fix


def test_an_update_that_waits_for_a_silent_worker_names_it() -> None:
    update = running_update(phase="prepare", waits_for="the workers, which receive it", deadline_in_s=279.0)
    first, *rest = findings(known(worker_row(ONE), silent_row(TWO), update=update))
    assert first.waits_for == f"worker {TWO}, which does not answer"
    assert first.until.startswith("in 5 min (")
    assert first.until.endswith("), then it is aborted")
    assert "`rl-plane abort u-17` ends it" in first.fix
    assert [one.name for one in rest] == [f"worker {TWO}"]


def test_a_trainer_that_stands_still_with_a_lost_worker_is_not_to_blame() -> None:
    gone = left_worker(left_at=NOW - 5)
    first, *_ = findings(known(worker_row(ONE), update=running_update(), left=(gone,)))
    assert first.waits_for == f"worker {TWO}, which does not answer"
    assert "and with it waits for the trainer's bytes" in first.cause
    assert "`rl-plane abort u-17` ends it; then publish again" in first.fix
    stopped = known(worker_row(ONE), update=running_update(), left=(gone,), processes={("gpu3", 4711): STOPPED})
    assert "train.py@gpu3:4711" in findings(stopped)[0].cause
    before = left_worker(left_at=NOW - 60)
    assert (
        "train.py@gpu3:4711" in findings(known(worker_row(ONE), update=running_update(), left=(before,)))[0].cause
    )


def test_a_decided_update_can_not_be_aborted() -> None:
    update = running_update(phase="gate", waits_for="the workers and frontends to learn the decision")
    found = only(known(worker_row(), update={**update, "idle_limit_s": None, "deadline_in_s": 4.0}))
    assert found.cause.startswith("is decided (phase gate)")
    assert "can't be aborted" in found.fix
    assert "aborted" not in found.until


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("disabled", f"`rl-plane enable {ONE}`"),
        ("behind: '/x' leads outside the weight roots", "--weight-root DIR"),
        ("behind: /x: No such file or directory", "bring the files back"),
        ("behind: the server answers 403", "correct what it names"),
        ("engine: no round trip within 5 s", "see its log"),
        ("numerics: difference 3", "docs/canary.md"),
        ("memory: kv_cache", "resume_memory"),
        ("updating", "wait"),
        ("an unheard reason", "see the log of the worker"),
    ],
)
def test_each_reason_of_a_closed_worker_has_a_fix(reason: str, fix: str) -> None:
    found = only(known(worker_row(ONE, reason)))
    assert found.cause.startswith("is closed (pid 42 on gpu1): ")
    assert reason.partition(": ")[2] in found.cause
    assert fix in found.fix


def test_reasons_that_follow_from_another_one_are_left_out() -> None:
    behind = only(known(worker_row(ONE, "starting", "behind: the server answers 403")))
    assert "behind" in behind.cause
    wrong = only(known(worker_row(ONE, "numerics: they differ by 3", "behind: fetched again"), worker_row(TWO)))
    assert "numerics" in wrong.cause
    assert "look at this one" in wrong.fix


def test_a_worker_that_left_is_a_finding_until_it_is_back() -> None:
    found = only(known(worker_row(ONE), left=(left_worker(),), expected=2))
    assert found.name == f"worker {TWO}"
    assert "left 12 s ago: it did not answer" in found.cause
    assert "ps -o stat,args -p 77" in found.fix
    assert findings(known(worker_row(ONE), worker_row(TWO), left=(left_worker(back=True),))) == []
    told = only(known(worker_row(ONE), left=(left_worker(exit_code=-9),)))
    assert "left 12 s ago: SIGKILL: it did not answer" in told.cause
    killed = only(known(worker_row(ONE), left=(left_worker(reason="connection", why="it was killed"),)))
    assert "ps -o stat,args -p 77" in killed.fix
    assert "If it is dead, see its log" in killed.fix
    stopped = known(
        worker_row(ONE), left=(left_worker(reason="connection", why="w"),), processes={("gpu3", 77): STOPPED}
    )
    assert only(stopped).fix == "`kill -CONT 77` on gpu3 continues it. It joins again by itself when it answers"
    assert findings(known(worker_row(ONE), left=(left_worker(reason="ended"),))) == [], "an operator ended it"


def test_a_worker_that_loads_its_engine_is_named_and_not_counted_as_missing() -> None:
    facts = known(worker_row(ONE), starting=(starting_row(TWO),), left=(left_worker(back=True),), expected=2)
    found = only(facts)
    assert found.cause == "starts since 95 s: loading the model (pid 4711 on gpu7)"
    assert found.waits_for == "its engine (vllm), in this phase since 81 s"
    assert found.fix == "wait, or see its log"
    assert explain(facts, TWO[:4]).lines()[1].startswith(f"worker {TWO} starts since 95 s")
    stopped = only(known(starting=(starting_row(TWO),), processes={("gpu7", 4711): STOPPED}))
    assert stopped.fix.startswith("`kill -CONT 4711` on gpu7 continues it")


def test_missing_workers_that_never_came_are_counted() -> None:
    found = only(known(worker_row(ONE), expected=3, left=(left_worker(reason="ended", back=True),)))
    assert found.cause.startswith("has 1 of 3 workers")
    assert explain(known(expected=3), None).now.startswith("ready, running, 0 of 3 workers")


def test_a_lost_nats_hides_the_silence_of_workers() -> None:
    nats = {**NATS, "connected": False, "lost_s": 9.0}
    facts = known(silent_row(ONE), silent_row(TWO), about={"nats": nats}, expected=3)
    found = only(facts)
    assert found.cause == "is not reached by the frontend since 9 s: nats://n:4222"
    lease = only(known(worker_row(), about={"serving_lease": False}))
    assert "no serving lease" in lease.cause
    error = {"code": "bus_unreachable", "message": "NATS did not read the bucket"}
    frozen = only(known(silent_row(ONE), silent_row(TWO), missing={"updates": error}))
    assert "JetStream does not answer" in frozen.cause


def test_a_pause_says_who_asked_and_when_it_ends() -> None:
    pause = {"paused": True, "mode": "keep", "lease_left_s": 90.0}
    asked = {"op": "pause", "who": "f", "caller": "train.py@gpu3:1", "asked_by": "key-1", "outcome": "ok"}
    found = only(known(worker_row(ONE, pause=pause), events=[("op", {**asked, "at": NOW - 30})]))
    assert found.cause.endswith("; asked by train.py@gpu3:1 with the key key-1 30 s ago")
    assert found.until.startswith("in 90 s (")
    assert "rl-plane resume" in found.fix


def test_the_finding_about_a_long_lock_names_its_holder() -> None:
    lock = {"owner": "train.py@gpu3:4711", "held_s": 40.0}
    found = only(known(worker_row(), about={"lock": lock}, processes={("gpu3", 4711): STOPPED}))
    assert "has belonged to train.py@gpu3:4711 for 40 s" in found.cause
    assert "kill -CONT 4711" in found.fix
    assert findings(known(worker_row(), about={"lock": {**lock, "held_s": 0.1}})) == []


def test_the_last_update_is_a_finding_if_it_failed() -> None:
    error = {"code": "invalid_request", "message": "no such file", "fix": "write it again"}
    rows = {ONE: {"status": "error", "error": error}}
    failed = ended_update("u-18", outcome="aborted", version=None, error=error, workers=rows)
    found = only(known(worker_row(), updates=[failed, ended_update()]))
    assert found.cause == f"was aborted on worker {ONE}, and nothing has changed: no such file"
    assert found.fix == "write it again"
    canary = {**failed, "error": {"code": "numerics", "message": "all workers failed the canary"}}
    assert "docs/canary.md" in only(known(worker_row(), updates=[canary])).fix
    old = {**failed, "ended_at": NOW - 7200}
    assert findings(known(worker_row(), updates=[old])) == []
    excluded = ended_update(excluded=[TWO])
    assert findings(known(worker_row(ONE), worker_row(TWO), updates=[excluded])) == [], "it has healed"
    out, closed = findings(known(worker_row(ONE), worker_row(TWO, "behind: x"), updates=[excluded]))
    assert {out.kind, closed.kind} == {"worker", "update"}


def test_a_request_without_a_worker_or_a_token_is_a_finding() -> None:
    row: dict[str, Any] = {
        "id": "req-1",
        "names": [],
        "worker": None,
        "tries": 2,
        "tokens": 0,
        "max_tokens": 64,
        "version": None,
        "elapsed_s": 20.0,
        "since_progress_s": 20.0,
    }
    assert "waits for an open worker since 20 s" in only(known(worker_row(), requests=[row])).cause
    slow = {**row, "worker": ONE, "tokens": 7, "version": {"label": "step_3", "sequence": 3}}
    found = explain(known(worker_row(ONE, running=3), requests=[slow]), "req-1")
    assert found.kind == "request"
    assert "is on worker aaaa000000000001, 7 of at most 64 tokens by step_3" in found.findings[0].cause
    assert found.facts == [f"worker {ONE} has 3 running and 0 waiting requests"]
    fast = {**slow, "since_progress_s": 0.1}
    assert findings(known(worker_row(), requests=[fast])) == []


def test_an_ended_request_is_explained_by_its_record() -> None:
    record = {
        "id": "req-2",
        "index": 0,
        "outcome": "ok",
        "finish_reason": "length",
        "first_token_s": 0.25,
        "seconds": 1.5,
        "token_ids": [1, 2],
        "weight_versions": [{"version": "step_3"}],
    }
    found = explain(known(worker_row(), records=[record]), "req-2")
    assert "has ended (ok, length) after 1.50 s, the first token after 0.25 s" in found.now
    assert found.facts == ["choice 0: 2 tokens by step_3"]


def test_a_request_of_several_choices_is_explained_as_one() -> None:
    row: dict[str, Any] = {
        "names": ["rollout 7"],
        "worker": ONE,
        "tries": 1,
        "tokens": 7,
        "max_tokens": 64,
        "version": None,
        "elapsed_s": 20.0,
        "since_progress_s": 20.0,
    }
    record = {
        "index": 2,
        "outcome": "ok",
        "finish_reason": "stop",
        "first_token_s": None,
        "seconds": 1.0,
        "token_ids": [1],
        "weight_versions": [],
    }
    running = [{**row, "id": "cmpl-a-0"}, {**row, "id": "cmpl-a-1", "worker": None, "elapsed_s": 30.0}]
    ended = [{**record, "id": "cmpl-a-2"}, {**record, "id": "cmpl-a-3", "index": 3}]
    facts = known(worker_row(ONE), requests=running, records=ended)
    with pytest.raises(InvalidRequest, match="may mean request cmpl-a, request cmpl-b"):
        explain(known(requests=[*running, {**row, "id": "cmpl-b"}]), "rollout 7")
    for given in ("cmpl-a", "cmpl", "rollout 7"):
        found = explain(facts, given)
        assert (found.kind, found.id, found.now) == ("request", "cmpl-a", "request cmpl-a runs since 30 s")
        assert {one.subject for one in found.findings} == {"cmpl-a-0", "cmpl-a-1"}
        assert found.facts[1:] == ["choice 2: 1 tokens by no version", "choice 3: 1 tokens by no version"]
    assert explain(facts, "cmpl-a-1").id == "cmpl-a-1"
    over = explain(known(worker_row(ONE), records=ended), "cmpl-a")
    assert [line.partition(":")[0] for line in over.facts] == ["choice 2", "choice 3"]
    two = [*running, {**row, "id": "cmpl-b-0"}]
    with pytest.raises(InvalidRequest, match="may mean request cmpl-a-0, request cmpl-a-1, request cmpl-b-0"):
        identify(known(worker_row(ONE), requests=two), "cmpl")


def test_an_id_is_recognised_by_its_beginning_or_its_label() -> None:
    requests = [{"id": "aaaa-request", "names": [], "worker": ONE}]
    facts = known(worker_row(ONE), left=(left_worker(),), updates=[ended_update()], requests=requests)
    assert identify(facts, TWO[:4]) == ("worker", TWO)
    assert identify(facts, ONE) == ("worker", ONE)
    assert identify(facts, "u-1") == ("update", "u-16")
    assert identify(facts, "step_3") == ("update", "u-16")
    with pytest.raises(InvalidRequest, match="may mean worker aaaa000000000001, request aaaa-request"):
        identify(facts, "aaaa")
    named = [*requests, {"id": "cmpl-q", "names": ["aaaa"], "worker": ONE}]
    assert identify(known(worker_row(ONE), requests=named), "aaaa") == ("request", "cmpl-q"), (
        "its caller's whole name"
    )
    with pytest.raises(
        NotFound, match="searched: 1 workers, 1 that left, 1 updates, the running requests and the given records"
    ) as raised:
        identify(facts, "zzz")
    assert "rl-plane workers" in raised.value.facts["fix"]


def test_a_label_means_the_newest_update() -> None:
    facts = known(worker_row(), update=running_update(label="step_3"), updates=[ended_update()])
    assert identify(facts, "step_3") == ("update", "u-17")


def test_the_timeline_of_an_update_has_its_phases_and_failures() -> None:
    error = {"code": "invalid_weights", "message": "1 missing", "fix": "write it again"}
    entry = ended_update(workers={ONE: {"status": "error", "error": error}}, outcome="aborted", error=error)
    found = explain(known(worker_row(), updates=[entry]), "u-16")
    text = "\n".join(found.past)
    assert "it began, asked by train.py@gpu3:4711" in found.past[0]
    assert "the phase prepare took 9.0 s" in text
    assert f"worker {ONE}: invalid_weights: 1 missing; fix: write it again" in text
    assert "it ended: aborted" in text
    assert "it took 10.0 s, and ended 90 s ago" in found.now


def test_the_timeline_of_a_worker_has_its_events_and_the_updates_that_it_failed() -> None:
    joined = ("member", {"instance_id": ONE, "change": "joined", "incarnation": "i", "at": NOW - 50})
    others = ("member", {"instance_id": TWO, "change": "joined", "incarnation": "i", "at": NOW - 49})
    error = {"code": "engine_failed", "message": "out of memory"}
    entry = ended_update(workers={ONE: {"status": "error", "error": error}})
    found = explain(known(worker_row(ONE), events=[others, joined], updates=[entry]), ONE)
    assert len(found.past) == 2
    assert "it failed in update u-16 (step_3): engine_failed: out of memory" in found.past[0]
    assert found.past[1].endswith(f"worker {ONE} joined")


def test_a_worker_that_left_is_explained() -> None:
    found = explain(known(worker_row(ONE), left=(left_worker(),)), TWO)
    assert found.now == f"worker {TWO} (pid 77 on gpu3) is not in the fleet"
    assert found.findings[0].waits_for == "its process to run again"
    assert "it left: it did not answer" in found.past[0]


def test_a_caller_names_its_process() -> None:
    assert process_of("train.py@gpu3:4711 at 10.0.0.7") == ("gpu3", 4711)
    assert process_of("a trainer@gpu-3.x:9") is None
    assert process_of("10.0.0.7") is None


@pytest.mark.parametrize(
    ("stat", "said"),
    [("7 (a) b) T 1", STOPPED), ("7 (python) S 1", ""), ("7 (python) Z 1", "is dead"), (None, GONE)],
)
def test_a_process_of_this_machine_says_its_state(tmp_path: Path, stat: str | None, said: str) -> None:
    (tmp_path / "7").mkdir()
    if stat is not None:
        (tmp_path / "7" / "stat").write_text(stat)
    assert read_facts.process_state(7, tmp_path) == said
