"""The numeric canary of a real fleet: no engine serves weights with which it computes something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rl_plane.errors import (
    BusUnreachable,
    CanaryFailed,
    Conflict,
    InvalidRequest,
    InvalidWeights,
    NotAdmitted,
    PlaneError,
    WrongNumerics,
)
from rl_plane.fleet.fleet import Fleet
from rl_plane.membership.worker_calls import WorkerCalls
from rl_plane.protocol.canary import default_canary
from rl_plane.protocol.subjects import CANARY_HISTORY, RECORD
from tests.support.dying_coordinator import CoordinatorDies, ends_at
from tests.support.faults import Faulty, StatusLog, Stream, spawn_faulty
from tests.support.faulty_bus import BusFaults
from tests.support.frontend_process import PROMPT, tokens_under
from tests.support.streaming_client import Streaming, http, ready
from worker.engines.fake.adapter import fake_prompt_logprobs, fake_token
from worker.receive.staging import model_digest

if TYPE_CHECKING:
    from tests.conftest import Plane

__all__ = ["http"]

SEQUENCES = [[3, 5, 7, 9], [11, 13]]


def update_of(directory: Path, version: str, **policy: Any) -> dict[str, Any]:
    transport = {"backend": "filesystem", "path": str(directory)}
    return {"transport": transport, "version": version, "policy": policy}


def scores_of(directory: Path, sequences: list[list[int]] = SEQUENCES) -> list[list[float]]:
    """Returns the scores that a sound engine computes with these weights."""
    digest = model_digest(directory)
    rows = [fake_prompt_logprobs(digest, tokens)[1:] for tokens in sequences]
    return [[value for value in row if value is not None] for row in rows]


def canary_of(directory: Path) -> dict[str, Any]:
    return {"sequences": SEQUENCES, "expected": scores_of(directory)}


async def state_of(client: WorkerCalls, instance_id: str) -> dict[str, Any]:
    await client.list_workers()
    out = await client.call_all("state")
    return next(dict(row.body) for row in out.rows if row.instance_id == instance_id)


async def until_closed_by_numerics(plane: Plane, client: WorkerCalls, instance_id: str) -> None:
    async def closed() -> bool:
        reasons = (await state_of(client, instance_id))["admission"]["reasons"]
        return any(reason.startswith("numerics: ") for reason in reasons)

    await plane.until(closed)


async def until_serving(plane: Plane, client: WorkerCalls, instance_id: str, label: str) -> None:
    async def serving() -> bool:
        state = await state_of(client, instance_id)
        return bool(state["ready"]) and state["applied_weight_version"] == label

    await plane.until(serving)


async def fleet_of(plane: Plane, count: int) -> tuple[Fleet, list[Faulty]]:
    fleet = await plane.fleet()
    workers = [spawn_faulty(plane) for _ in range(count)]
    return fleet, workers


async def failed_update(fleet: Fleet, body: dict[str, Any], kind: type[PlaneError]) -> PlaneError:
    with pytest.raises(kind) as caught:
        await fleet.run("update_weights", body)
    assert type(caught.value) is kind
    return caught.value


async def test_the_answer_and_the_history_show_how_near_the_workers_are(plane: Plane) -> None:
    fleet, _ = await fleet_of(plane, 2)
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one"))
    nearness = {"against": "fleet", "difference": 0.0, "mismatch_kl": 0.0}
    assert reply["canary"].items() >= {"action": "open", "scored": 2, "failed": 0, **nearness}.items()
    assert all(row["canary"]["passed"] and "vectors" not in row["canary"] for row in reply["workers"])
    listed = (await fleet.run("updates", {}))["updates"]
    assert listed[0]["canary"] == reply["canary"]
    directory = plane.model(2)
    reply = await fleet.run("update_weights", update_of(directory, "two", canary=canary_of(directory)))
    assert reply["canary"]["against"] == "trainer"
    assert reply["canary"]["difference"] < 1e-5


async def test_a_worker_that_differs_from_the_others_is_excluded_and_heals(plane: Plane) -> None:
    fleet, (bad, *good) = await fleet_of(plane, 3)
    bad.fail("miscompute")
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one"))
    assert reply["excluded"] == [bad.instance_id]
    row = next(row for row in reply["workers"] if row["instance_id"] == bad.instance_id)
    assert row["error"]["code"] == "numerics"
    told = row["error"]["canary"]
    assert told["difference"] > told["tolerance"]
    assert told["expected"] != told["measured"]
    for worker in good:
        assert (await state_of(fleet.client, worker.instance_id))["ready"]
    await until_closed_by_numerics(plane, fleet.client, bad.instance_id)
    with pytest.raises(NotAdmitted):
        await Stream(fleet.client, bad.instance_id, [1, 2], 4).end()
    bad.mend("miscompute")
    await fleet.run("enable", {"workers": [bad.instance_id]})
    await until_serving(plane, fleet.client, bad.instance_id, "one")
    healed = await Stream(fleet.client, bad.instance_id, [1, 2], 4).end()
    assert healed.tokens == [fake_token(model_digest(plane.model(1)), [1, 2], place) for place in range(4)]


async def test_no_token_goes_out_that_a_running_request_made_before_its_worker_failed(plane: Plane) -> None:
    fleet = await plane.fleet()
    bad = spawn_faulty(plane, token_delay_s="0.01")
    for _ in range(2):
        spawn_faulty(plane)
    stream = Stream(fleet.client, bad.instance_id, [1, 2], 4000)
    await stream.until(tokens=3)
    bad.fail("miscompute")
    await fleet.run("update_weights", update_of(plane.model(1), "one"))
    with pytest.raises(WrongNumerics):
        await stream.end()
    before = model_digest(plane.model(0))
    assert stream.tokens == [fake_token(before, [1, 2], place) for place in range(len(stream.tokens))]


async def test_a_request_whose_worker_fails_continues_at_another_one(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    fleet = await plane.fleet()
    bad, *others = (spawn_faulty(plane, token_delay_s="0.01") for _ in range(3))
    await ready(plane, 3)
    ids = [worker.instance_id for worker in others]
    await fleet.run("disable", {"workers": ids})
    penalised = Streaming(http, max_tokens=300, frequency_penalty=0.5)
    async with Streaming(http, max_tokens=300) as moving, penalised as ending:
        for stream in (moving, ending):
            await stream.until(lambda stream: len(stream.tokens) >= 3)
        await fleet.run("enable", {"workers": ids})
        bad.fail("miscompute")
        await fleet.run("update_weights", update_of(plane.model(1), "one"))
        await moving.end()
        await ending.end()
    old, new = model_digest(plane.model(0)), model_digest(plane.model(1))
    assert moving.error is None
    seam = moving.spans[0]["end"]
    assert [(span["version"], span["start"], span["end"]) for span in moving.spans] == [
        ("initial", 0, seam),
        ("one", seam, 300),
    ]
    after = [fake_token(new, PROMPT + moving.tokens[:seam], place) for place in range(300 - seam)]
    assert moving.tokens == tokens_under(old, 0, seam) + after
    assert moving.last["instance_id"] in ids
    assert ending.error is not None
    assert ending.error["code"] == "wrong_numerics"
    assert ending.error["partial"]["token_ids"] == ending.tokens == tokens_under(old, 0, len(ending.tokens))


async def test_a_request_continues_under_the_restored_version(plane: Plane, http: httpx.AsyncClient) -> None:
    fleet = await plane.fleet()
    spawn_faulty(plane, token_delay_s="0.01")
    await ready(plane, 1)
    wrong = {"sequences": SEQUENCES, "expected": scores_of(plane.model(3))}
    async with Streaming(http, max_tokens=300) as stream:
        await stream.until(lambda stream: len(stream.tokens) >= 3)
        await failed_update(fleet, update_of(plane.model(1), "one", canary=wrong), CanaryFailed)
        await stream.end()
    assert stream.error is None
    seam = stream.spans[0]["end"]
    assert [(span["version"], span["sequence"]) for span in stream.spans] == [("initial", 0), ("initial", 2)]
    old = model_digest(plane.model(0))
    after = [fake_token(old, PROMPT + stream.tokens[:seam], place) for place in range(300 - seam)]
    assert stream.tokens == tokens_under(old, 0, seam) + after


async def test_a_running_request_continues_if_its_worker_passes(plane: Plane) -> None:
    fleet = await plane.fleet()
    workers = [spawn_faulty(plane, token_delay_s="0.01") for _ in range(2)]
    stream = Stream(fleet.client, workers[0].instance_id, [1, 2], 4000)
    await stream.until(tokens=3)
    await fleet.run("update_weights", update_of(plane.model(1), "one"))
    await stream.until(spans=2)
    assert [span["version"] for span in stream.spans] == ["initial", "one"]
    stream.stop()


async def test_a_version_that_all_miss_goes_back_to_the_one_before(plane: Plane) -> None:
    fleet, workers = await fleet_of(plane, 2)
    await fleet.run("update_weights", update_of(plane.model(1), "one", canary=canary_of(plane.model(1))))
    wrong = update_of(
        plane.model(2), "two", canary={"sequences": SEQUENCES, "expected": scores_of(plane.model(3))}
    )
    with pytest.raises(CanaryFailed) as caught:
        await fleet.run("update_weights", wrong, request_id="again")
    error = caught.value
    assert error.facts["failed_version"]["label"] == "two"
    assert error.facts["version"].items() >= {"label": "one", "sequence": 3}.items()
    assert error.facts["canary"].items() >= {"action": "rollback", "failed": 2, "against": "trainer"}.items()
    for worker in workers:
        state = await state_of(fleet.client, worker.instance_id)
        assert (state["ready"], state["applied_weight_version"], state["sequence"]) == (True, "one", 3)
    with pytest.raises(CanaryFailed) as repeated:
        await fleet.run("update_weights", wrong, request_id="again")
    assert repeated.value.facts["repeated"]
    reply = await fleet.run("update_weights", update_of(plane.model(2), "two"))
    assert reply["version"]["sequence"] == 4


Row = tuple[str, str, int | None, str | None]


async def rows_of(fleet: Fleet) -> list[Row]:
    """The history, newest first."""
    return [
        (
            entry["label"],
            entry["outcome"],
            entry["version"] and entry["version"]["sequence"],
            entry.get("error", {}).get("code"),
        )
        for entry in (await fleet.run("updates", {}))["updates"]
    ]


async def test_a_later_update_leaves_the_history_of_a_roll_back_as_it_was(plane: Plane) -> None:
    fleet, workers = await fleet_of(plane, 2)
    ids = sorted(worker.instance_id for worker in workers)
    await fleet.run("update_weights", update_of(plane.model(1), "one"))
    wrong = update_of(
        plane.model(2), "two", canary={"sequences": SEQUENCES, "expected": scores_of(plane.model(3))}
    )
    with pytest.raises(CanaryFailed):
        await fleet.run("update_weights", wrong, request_id="bad")
    before: list[Row] = [
        ("one", "committed", 3, None),
        ("two", "aborted", None, "numerics"),
        ("one", "committed", 1, None),
        ("initial", "committed", 0, None),
    ]
    assert await rows_of(fleet) == before
    back, failed, *_ = (await fleet.run("updates", {}))["updates"]
    assert {key: row["error"]["code"] for key, row in failed["workers"].items()} == dict.fromkeys(ids, "numerics")
    assert {key: row["status"] for key, row in back["workers"].items()} == dict.fromkeys(ids, "ok")
    assert back["who"] == failed["who"] != ""
    await fleet.run("update_weights", update_of(plane.model(3), "three"))
    after: list[Row] = [("three", "committed", 4, None), *before]
    assert await rows_of(fleet) == after
    with pytest.raises(CanaryFailed) as repeated:
        await fleet.run("update_weights", wrong, request_id="bad")
    assert repeated.value.facts["repeated"]
    assert await rows_of(fleet) == after, "nothing has run again"
    reply = await fleet.run("update_weights", {"rollback": {"sequence": 3}})
    assert (reply["version"]["label"], reply["version"]["sequence"]) == ("one", 5)


async def test_the_roll_back_of_a_dead_coordinator_is_in_the_history(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, _ = await fleet_of(plane, 1)
    await fleet.run("update_weights", update_of(plane.model(1), "one"))
    wrong = update_of(
        plane.model(2), "two", canary={"sequences": SEQUENCES, "expected": scores_of(plane.model(3))}
    )
    with monkeypatch.context() as patch:
        ends_at(patch, "commit", CoordinatorDies())
        with pytest.raises(CoordinatorDies):
            await fleet.run("update_weights", wrong, request_id="bad")
    await fleet.updates.finish()
    before: list[Row] = [
        ("one", "committed", 3, None),
        ("two", "aborted", None, "numerics"),
        ("one", "committed", 1, None),
        ("initial", "committed", 0, None),
    ]
    assert await rows_of(fleet) == before
    await fleet.run("update_weights", update_of(plane.model(3), "three"))
    assert await rows_of(fleet) == [("three", "committed", 4, None), *before]
    with pytest.raises(CanaryFailed):
        await fleet.run("update_weights", wrong, request_id="bad")
    assert (await rows_of(fleet))[0] == ("three", "committed", 4, None)


@pytest.mark.slow
@pytest.mark.parallel
async def test_scores_reach_the_next_coordinator_while_failed_weights_are_fetched_again(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, (only,) = await fleet_of(plane, 1)
    await fleet.run("update_weights", update_of(plane.model(1), "one"))
    directory = plane.model(1).parent / "gone"
    shutil.copytree(plane.model(2), directory)
    wrong = update_of(directory, "two", canary={"sequences": SEQUENCES, "expected": scores_of(plane.model(3))})
    with monkeypatch.context() as patch:
        ends_at(patch, "decide", CoordinatorDies(), after=1)  # before it can bring the version before back
        with pytest.raises(CoordinatorDies):
            await fleet.run("update_weights", wrong)
    shutil.rmtree(directory)  # so it is fetched for as long as the test takes

    async def fetching() -> bool:
        reasons = (await state_of(fleet.client, only.instance_id))["admission"]["reasons"]
        return any(reason.startswith("behind") for reason in reasons)

    await plane.until(fetching)
    await fleet.updates.finish()
    await until_serving(plane, fleet.client, only.instance_id, "one")


@pytest.mark.slow
@pytest.mark.parallel
async def test_the_error_of_a_roll_back_that_no_worker_can_fetch_does_not_call_it_served(plane: Plane) -> None:
    fleet, (only,) = await fleet_of(plane, 1)
    directory = plane.model(1).parent / "gone"
    shutil.copytree(plane.model(1), directory)
    await fleet.run("update_weights", update_of(directory, "one"))
    shutil.rmtree(directory)
    canary = {"sequences": SEQUENCES, "expected": scores_of(plane.model(3))}
    body = update_of(plane.model(2), "two", canary=canary, commit_timeout_s=1)
    error = await failed_update(fleet, body, CanaryFailed)
    assert error.facts["serving"] == []
    assert "no worker serves one, which is committed again" in error.message
    assert "no worker could bring it back" in error.facts["canary"]["warning"]
    back = (await fleet.run("updates", {}))["updates"][0]
    assert back["workers"][only.instance_id]["status"] == "error"
    reply = await fleet.run("update_weights", update_of(plane.model(3), "three"))
    assert reply["excluded"] == []


async def test_exclude_leaves_a_version_that_all_miss_unserved(plane: Plane) -> None:
    fleet, workers = await fleet_of(plane, 2)
    canary = {"sequences": SEQUENCES, "expected": scores_of(plane.model(3))}
    body = update_of(plane.model(2), "two", canary=canary, on_canary_failure="exclude")
    error = await failed_update(fleet, body, CanaryFailed)
    assert error.facts["canary"].items() >= {"action": "exclude", "failed": 2}.items()
    assert "which stays committed" in error.message
    assert (await rows_of(fleet))[0] == ("two", "committed", 1, "numerics")
    with pytest.raises(Conflict, match="no worker has ever served it"):
        await fleet.run("update_weights", {"rollback": {"label": "two"}})
    for worker in workers:
        assert not (await state_of(fleet.client, worker.instance_id))["ready"]
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one"))
    assert reply["excluded"] == []


@pytest.mark.parametrize("barrier", ["strict", "rolling"])
async def test_warn_serves_a_version_that_all_miss(plane: Plane, barrier: str) -> None:
    fleet, workers = await fleet_of(plane, 2)
    canary = {"sequences": SEQUENCES, "expected": scores_of(plane.model(3))}
    body = update_of(plane.model(2), "two", canary=canary, on_canary_failure="warn", barrier=barrier)
    reply = await fleet.run("update_weights", body)
    assert (reply["canary"]["action"], reply["canary"]["failed"], reply["excluded"]) == ("open", 2, [])
    assert "every worker failed the canary" in reply["canary"]["warning"]
    noted = await fleet.client.bus.get(fleet.client.subjects().state, CANARY_HISTORY)
    assert noted is None, "values that missed the trainer's are no measure for later"
    for worker in workers:
        state = await state_of(fleet.client, worker.instance_id)
        assert state["ready"]
        assert (state["canary"]["against"], state["canary"]["difference"]) == ("nothing", None)
        assert "every worker failed the canary" in state["canary"]["warning"]
        stream = Stream(fleet.client, worker.instance_id, [1, 2], 3)
        await stream.end()
        assert stream.tokens == [fake_token(model_digest(plane.model(2)), [1, 2], place) for place in range(3)]


async def test_two_differing_workers_return_to_the_version_before_without_a_reference(plane: Plane) -> None:
    fleet, (bad, good) = await fleet_of(plane, 2)
    bad.fail("miscompute")
    error = await failed_update(fleet, update_of(plane.model(1), "one"), CanaryFailed)
    assert error.facts["version"]["label"] == "initial"
    await until_serving(plane, fleet.client, good.instance_id, "initial")


async def test_a_single_worker_is_compared_with_earlier_values_of_its_version(plane: Plane) -> None:
    fleet, (only,) = await fleet_of(plane, 1)
    await fleet.run("update_weights", update_of(plane.model(1), "one"))
    await fleet.run("update_weights", update_of(plane.model(2), "two"))
    only.fail("miscompute")
    error = await failed_update(fleet, update_of(plane.model(1), "one again", commit_timeout_s=1), CanaryFailed)
    assert error.facts["canary"]["against"] == "reference"
    await until_closed_by_numerics(plane, fleet.client, only.instance_id)
    only.mend("miscompute")
    await fleet.run("enable", {"workers": [only.instance_id]})
    await until_serving(plane, fleet.client, only.instance_id, "two")


async def test_a_worker_that_comes_later_passes_the_canary_before_it_is_admitted(plane: Plane) -> None:
    fleet, _ = await fleet_of(plane, 1)
    await fleet.run("update_weights", update_of(plane.model(1), "one"))
    late = spawn_faulty(plane, "miscompute")
    await until_closed_by_numerics(plane, fleet.client, late.instance_id)
    assert not (await state_of(fleet.client, late.instance_id))["ready"]
    late.mend("miscompute")
    await fleet.run("enable", {"workers": [late.instance_id]})
    await until_serving(plane, fleet.client, late.instance_id, "one")


async def test_a_rolling_update_stops_at_the_first_worker_and_goes_back(plane: Plane) -> None:
    fleet, workers = await fleet_of(plane, 2)
    wrong = {"sequences": SEQUENCES, "expected": scores_of(plane.model(3))}
    error = await failed_update(
        fleet, update_of(plane.model(1), "one", canary=wrong, barrier="rolling"), CanaryFailed
    )
    assert error.facts["canary"]["scored"] == 1
    for worker in workers:
        await until_serving(plane, fleet.client, worker.instance_id, "initial")
    right = update_of(plane.model(1), "one", canary=canary_of(plane.model(1)), barrier="rolling")
    reply = await fleet.run("update_weights", right)
    assert (reply["canary"]["scored"], reply["excluded"]) == (2, [])


async def test_a_worker_scores_resumed_memory_before_it_opens(plane: Plane) -> None:
    fleet, (bad, _) = await fleet_of(plane, 2)
    canary = canary_of(plane.model(1))
    await fleet.run("release_memory", {"tags": ["kv_cache"]})
    bad.fail("miscompute")
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one", canary=canary))
    assert "canary" not in reply, "nothing can be scored yet"
    await fleet.run("resume_memory", {"tags": ["kv_cache"]})
    await until_closed_by_numerics(plane, fleet.client, bad.instance_id)


async def test_an_update_without_a_canary_accepts_a_worker_that_miscomputes(plane: Plane) -> None:
    fleet, (bad, _, _) = await fleet_of(plane, 3)
    bad.fail("miscompute")
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one", canary="off"))
    assert "canary" not in reply
    assert reply["excluded"] == []


@pytest.mark.parametrize(
    ("canary", "field"),
    [
        ({"sequences": [[1]]}, "policy.canary.sequences.0"),
        ({"sequences": [[1, 2]], "expected": [[-1.0, -2.0]]}, "policy.canary.expected.0"),
        ({"sequences": [[1, 600]]}, "policy.canary.sequences.0.1"),
        ({"sequences": [["1", 2]]}, "policy.canary.sequences.0.0"),
        ({"sequences": [[1, 2]], "expected": [[float("nan")]]}, "policy.canary.expected.0.0"),
        ({"sequences": [[1, 2]], "tolerance": 0}, "policy.canary.tolerance"),
        ("on", "policy.canary"),
    ],
)
async def test_a_wrong_canary_is_refused_before_anything_is_touched(plane: Plane, canary: Any, field: str) -> None:
    fleet, (only,) = await fleet_of(plane, 1)
    error = await failed_update(fleet, update_of(plane.model(1), "one", canary=canary), InvalidRequest)
    assert error.facts["field"] == field
    state = await state_of(fleet.client, only.instance_id)
    assert (state["sequence"], state["staged"], state["ready"]) == (0, None, True)


async def test_the_default_canary_is_scored_by_every_worker(plane: Plane) -> None:
    fleet, _ = await fleet_of(plane, 1)
    await fleet.run("update_weights", update_of(plane.model(1), "one"))
    record = (await fleet.client.view()).record
    assert record is not None
    assert record.canary is not None
    assert record.canary.sequences == tuple(tuple(tokens) for tokens in default_canary(512).sequences)


async def test_an_update_whose_open_record_is_lost_once_is_opened_by_its_own_call(plane: Plane) -> None:
    faults, written = BusFaults(), 0
    fleet = Fleet(await plane.client(connect_bus=faults.connect))
    spawn_faulty(plane)
    spawn_faulty(plane)

    async def lose_the_third(key: str) -> None:  # after the seal and the decision
        nonlocal written
        written += key == RECORD
        if key == RECORD and written == 3:
            raise BusUnreachable("the write was lost")

    faults.before_put = lose_the_third
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one", commit_timeout_s=4.0))
    assert written > 3
    assert (reply["excluded"], reply["canary"]["scored"]) == ([], 2)


async def test_a_later_worker_of_a_rolling_update_is_judged_by_the_first_ones(plane: Plane) -> None:
    fleet, workers = await fleet_of(plane, 2)
    first, second = sorted(workers, key=lambda worker: worker.instance_id)
    statuses = await StatusLog.follow(fleet.client)
    second.fail("miscompute")
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one", barrier="rolling"))
    assert reply["excluded"] == [second.instance_id]
    row = next(row for row in reply["workers"] if row["instance_id"] == second.instance_id)
    assert row["error"]["canary"]["against"] == "reference"
    served = [status for status in statuses.of(second.instance_id) if status["admission"]["open"]]
    assert all(status["version"]["label"] == "initial" for status in served)
    assert (await state_of(fleet.client, first.instance_id))["ready"]


async def test_a_canary_beside_the_checkpoint_is_the_versions_own(plane: Plane) -> None:
    fleet, (bad, _) = await fleet_of(plane, 2)
    before = model_digest(plane.model(1))
    (plane.model(1) / "canary.json").write_text(json.dumps(canary_of(plane.model(1))))
    assert model_digest(plane.model(1)) == before, "no digest covers it"
    bad.fail("miscompute")
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one"))
    assert (reply["canary"]["against"], reply["canary"]["origin"]) == ("trainer", "canary.json")
    assert reply["excluded"] == [bad.instance_id]
    reply = await fleet.run("update_weights", update_of(plane.model(1), "two", canary="off"))
    assert "canary" not in reply


@pytest.mark.parametrize("staging", ["host", "none"])
@pytest.mark.parametrize(
    ("text", "kind", "field"),
    [
        ('{"sequences": [[1, 600]]}', InvalidRequest, "canary.json.sequences.0.1"),
        ('{"sequences": [[1, "2"]]}', InvalidRequest, "canary.json.sequences.0.1"),
        ('{"sequences": [[1, 2]], "expected": [[-1.0, -2.0]]}', InvalidRequest, "canary.json.expected.0"),
        ('{"sequences": [[1, 2]], "more": 1}', InvalidRequest, "canary.json.more"),
        ('{"sequences": [[1, 2]], "tolerance": NaN}', InvalidWeights, "transport.path"),
        ("{" + " " * 100_000 + "}", InvalidWeights, "transport.path"),
    ],
)
async def test_a_wrong_canary_beside_the_checkpoint_is_refused_before_anything_is_touched(
    plane: Plane, text: str, kind: type[PlaneError], field: str, staging: str
) -> None:
    fleet, (only,) = await fleet_of(plane, 1)
    (plane.model(1) / "canary.json").write_text(text)
    error = await failed_update(fleet, update_of(plane.model(1), "one", staging=staging), kind)
    assert error.facts["field"] == field
    if kind is InvalidWeights:
        assert "canary.json" in error.message
    state = await state_of(fleet.client, only.instance_id)
    assert (state["sequence"], state["staged"], state["ready"]) == (0, None, True)


@pytest.mark.parametrize("text", ["{", '{"sequences": [[1, 600]]}'])
async def test_a_wrong_canary_file_is_ignored_where_the_update_gives_its_own(plane: Plane, text: str) -> None:
    fleet, _ = await fleet_of(plane, 1)
    (plane.model(1) / "canary.json").write_text(text)
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one", canary=canary_of(plane.model(1))))
    assert (reply["canary"]["against"], reply["canary"]["origin"]) == ("trainer", "update")
    (plane.model(2) / "canary.json").write_text(text)
    assert "canary" not in await fleet.run("update_weights", update_of(plane.model(2), "two", canary="off"))
    reply = await fleet.run("update_weights", update_of(plane.model(3), "three"))
    assert reply["canary"]["origin"] == "default"


async def test_the_answer_names_why_workers_failed(plane: Plane) -> None:
    fleet, (bad, *_) = await fleet_of(plane, 3)
    bad.fail("miscompute")
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one"))
    assert reply["canary"]["reasons"] == {"fleet": 1}
