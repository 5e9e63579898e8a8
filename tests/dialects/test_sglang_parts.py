"""An update that SGLang's clients send in several calls: its parts, its end, and what is lost on the way."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.dialects.sglang.open_sessions import Opened
from frontend.facade.op_runner import OpRunner
from frontend.frontend_limits import FrontendLimits
from rl_plane.commit.steps import SESSION_IDLE_S
from rl_plane.errors import BusUnreachable, Locked
from rl_plane.protocol.subjects import OPENED
from tests.support.dialect_facade import Answered, facade, fine, just_before, refused, served
from tests.support.sglang_calls import on_disk, one_by_one, tensors_of

if TYPE_CHECKING:
    from tests.conftest import Plane


NAMED = {"new_version": "seven", "abort_all_requests": False}
OVERTAKES_S = 1.0
"""A call that nothing holds up is answered by then."""


async def test_tensors_are_taken_only_after_every_worker_reports_what_its_model_needs(plane: Plane) -> None:
    """A silent worker may need a tensor that the other workers tie, so no tensor is taken before it has answered."""
    plane.spawn_copies(2)
    run, silent = OpRunner.run, 1

    async def some_are_silent(calls: OpRunner, name: str, *more: Any, **how: Any) -> Any:
        reply = await run(calls, name, *more, **how)
        if name != "describe":
            return reply
        told, lost = reply["workers"][silent:], reply["workers"][:silent]
        return {**reply, "workers": [*told, *({**_head(row), "status": "error"} for row in lost)]}

    async with facade(plane) as http:
        for seed in (1, 2):
            body = tensors_of(plane, seed)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(OpRunner, "run", some_are_silent)
                answer = await http.post("/update_weights_from_tensor", json=body)
            assert f"{silent} of 2 workers did not answer" in refused(answer, 503)["message"]
            assert fine(await http.post("/update_weights_from_tensor", json=body))["weight_version"] == "one"
            silent += 1


def _head(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("instance_id", "incarnation")}


async def test_a_repeated_part_gets_the_same_answer_and_changes_nothing(plane: Plane) -> None:
    """verl's client sends a call again, up to three times, when it has waited for its answer for 60 s."""
    plane.spawn_copies(2)
    path = "/update_weights_from_tensor"
    async with facade(plane) as http:

        async def sequence() -> int:
            return int(fine(await http.get("/v1/rl/state"))["sequence"])

        for step in (1, 2):
            label = {"weight_version": str(step)}
            *parts, last = [
                {**body, **label} for body in one_by_one(plane, 1)
            ]  # the same weights, by another name
            for part in parts:
                told = fine(await http.post(path, json=part))
                assert "have come" in told["message"]
                await http.post("/abort_request", json={"rid": "unknown"})  # of a rollout's client
                assert fine(await http.post(path, json=part)) == told
            assert fine(await http.post(path, json=parts[0]))["message"].startswith("1 tensors have come, 1 of")
            done = fine(await http.post(path, json=last))
            assert done["weight_version"] == str(step)
            for _ in range(2):
                assert fine(await http.post(path, json=last)) == done
            assert await sequence() == step
            assert (await http.get("/flush_cache")).status_code == 200
        # Another update has come between: it is another call now.
        fine(await http.post("/v1/rl/update_weights", json={"transport": on_disk(plane, 2)}))
        assert "have come" in fine(await http.post(path, json=last))["message"]
        # Under one id there is one call.
        first, second = parts[:2]
        named = {"Idempotency-Key": "one"}
        told = fine(await http.post(path, json=first, headers=named))
        assert refused(await http.post(path, json=second, headers=named), 400)["field"] == "Idempotency-Key"
        assert fine(await http.post(path, json=first, headers=named)) == told
        assert await sequence() == 3


async def test_repeated_tensors_belong_to_the_update_that_was_opened_since(plane: Plane) -> None:
    plane.spawn()
    path, body = "/update_weights_from_tensor", tensors_of(plane, 1)
    async with facade(plane) as http:
        for opens, ends in (
            ("/begin_weight_update", "/end_weight_update"),
            ("/pause_generation", "/continue_generation"),
        ):
            for _ in range(2):
                assert fine(await http.post(path, json=body))["weight_version"] == "one"
            fine(await http.post(opens, json={}))
            assert "have come" in fine(await http.post(path, json=body))["message"]
            assert fine(await http.post(ends, json={}))["weight_version"] == "one"
        assert fine(await http.get("/v1/rl/state"))["sequence"] == 4


async def test_a_last_part_that_found_the_fleet_taken_may_come_again(plane: Plane) -> None:
    plane.spawn_copies(2)
    path = "/update_weights_from_tensor"
    async with facade(plane) as http:
        *parts, last = one_by_one(plane, 1)
        for part in parts:
            fine(await http.post(path, json=part))
        prepared = fine(await http.post("/v1/rl/prepare_weights_update", json={"transport": on_disk(plane, 2)}))
        assert refused(await http.post(path, json=last), 503)["code"] == "locked"
        fine(await http.post("/v1/rl/abort_weights_update", json={"update_id": prepared["update_id"]}))
        assert fine(await http.post(path, json=last))["weight_version"] == "one"
        assert await served(http) == [(True, "one")] * 2


async def test_a_part_that_arrives_during_a_failed_commit_is_not_lost(plane: Plane) -> None:
    """The commit may not begin, and then puts back what it had taken: the part comes to that, and is not lost."""
    plane.spawn_copies(2)
    path = "/update_weights_from_tensor"
    async with facade(plane) as http:
        *parts, last = one_by_one(plane, 1)
        fine(await http.post("/begin_weight_update", json={}))
        for part in parts:
            fine(await http.post(path, json=part))
        calls = []

        async def meanwhile(answered: Answered) -> None:
            calls.append(asyncio.create_task(http.post(path, json=last)))
            await asyncio.wait(calls, timeout=OVERTAKES_S)
            raise Locked("taken", retry_after_s=1.0)

        async with just_before("update_weights", meanwhile):
            assert refused(await http.post("/end_weight_update", json={}), 503)["code"] == "locked"
        (told,) = await asyncio.gather(*calls)
        assert fine(told)["message"] == f"1 tensors have come, {len(parts) + 1} of this update"
        assert fine(await http.post("/end_weight_update", json={}))["weight_version"] == "one"
        assert await served(http) == [(True, "one")] * 2


async def test_a_finish_takes_only_an_update_of_its_own(plane: Plane) -> None:
    """The finish does not take an update that the facade's own call prepared, nor another trainer's if its own is
    lost."""
    plane.spawn_copies(2)

    async def begin(at: httpx.AsyncClient, seed: int) -> None:
        fine(await at.post("/start_weight_update"))
        fine(await at.post("/update_weights", json={"update_info": {"weight_dir": str(plane.model(seed))}}))

    async with facade(plane) as http, facade(plane) as other:
        fine(await http.post("/v1/rl/prepare_weights_update", json={"transport": on_disk(plane, 1)}))
        for at in (http, other):
            refused(await at.post("/finish_weight_update", json={"weight_version": "not its"}), 409)
        fine(await http.post("/v1/rl/complete_weights_update", json={"version": "its own"}))
        assert await served(http) == [(True, "its own")] * 2
        await begin(http, 2)
        fine(await http.post("/v1/rl/abort_weights_update", json={}))
        await begin(other, 1)
        refused(await http.post("/finish_weight_update", json={"weight_version": "lost"}), 409)
        fine(await other.post("/finish_weight_update", json={"weight_version": "the other's"}))
        assert await served(http) == [(True, "the other's")] * 2


async def test_a_name_that_was_given_at_one_frontend_is_known_at_another(plane: Plane) -> None:
    """An update of vLLM's may be begun, named and finished at different frontends."""
    plane.spawn_copies(2)
    async with facade(plane) as one, facade(plane) as other:
        for seed, (begins, names, finishes) in enumerate(
            ((one, one, other), (other, one, one), (one, other, one), (other, one, other))
        ):
            label = {"new_version": f"step_{seed}"}
            fine(await begins.post("/start_weight_update"))
            update = {"update_info": {"weight_dir": str(plane.model(seed % 2))}}
            fine(await begins.post("/update_weights", json=update))
            fine(await names.post("/update_weight_version", json=label))
            fine(await finishes.post("/finish_weight_update"))
            assert await served(one) == [(True, f"step_{seed}")] * 2
        # Before its weights have come, too.
        fine(await one.post("/start_weight_update"))
        fine(await one.post("/update_weight_version", json={"new_version": "early"}))
        fine(await one.post("/update_weights", json={"update_info": {"weight_dir": str(plane.model(1))}}))
        fine(await other.post("/finish_weight_update"))
        assert await served(one) == [(True, "early")] * 2


async def test_the_answer_reports_a_commit_though_nats_lost_the_end_of_its_update(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence ends an update that was begun. Where nothing was committed, the call may be repeated."""
    plane.spawn_copies(2)

    async def unreachable(opened: Opened) -> None:
        raise BusUnreachable("NATS was away for a moment")

    async with facade(plane) as http:
        fine(await http.post("/begin_weight_update", json={}))
        fine(await http.post("/update_weights_from_tensor", json=tensors_of(plane, 1)))
        monkeypatch.setattr(Opened, "end", unreachable)
        assert fine(await http.post("/end_weight_update", json={}))["weight_version"] == "one"
        assert fine(await http.post("/end_weight_update", json={}))["weight_version"] == "one", "it is asked again"
        assert await served(http) == [(True, "one")] * 2
        fine(await http.post("/begin_weight_update", json={}))
        assert refused(await http.post("/end_weight_update", json={}), 503)["code"] == "bus_unreachable"


async def test_each_end_call_reports_weights_that_were_lost_with_a_frontend(plane: Plane) -> None:
    plane.spawn_copies(2)
    whole = tensors_of(plane, 1)
    for opening in ("/begin_weight_update", "/pause_generation"):
        async with facade(plane) as http:
            fine(await http.post(opening, json={}))
            fine(await http.post("/update_weights_from_tensor", json=whole))
            fine(await http.post("/pause_generation", json={}))
        async with facade(plane) as http:
            for path in ("/end_weight_update", "/continue_generation") * 2:
                error = refused(await http.post(path, json={}), 409)
                assert ("is lost" in error["message"], "send all of it again" in error["fix"]) == (True, True)
            error = refused(await http.post("/update_weight_version", json=NAMED), 409)
            assert "is lost" in error["message"], "what is served is not what is meant"
            assert await served(http) == [(True, "initial")] * 2
            for path in ("/begin_weight_update", "/end_weight_update"):
                fine(await http.post(path, json={}))
            fine(await http.post("/continue_generation", json={}))


async def test_a_newer_committed_version_replaces_lost_weights(plane: Plane) -> None:
    """Another trainer has committed newer weights without bodies, and labels them."""
    plane.spawn_copies(2)
    async with facade(plane) as http:
        fine(await http.post("/begin_weight_update", json={}))
        fine(await http.post("/update_weights_from_tensor", json=tensors_of(plane, 1)))
    async with facade(plane) as http:
        refused(await http.post("/end_weight_update", json={}), 409)
        fine(await http.post("/update_weights_from_disk", json={"model_path": str(plane.model(2))}))
        fine(await http.post("/update_weight_version", json=NAMED))
        for path in ("/end_weight_update", "/continue_generation"):
            fine(await http.post(path, json={}))
        assert await served(http) == [(True, "seven")] * 2


async def test_the_flush_and_the_log_report_an_incomplete_update(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    """verl's order: buckets without a pause, then a flush."""
    plane.spawn()
    first, *rest = bodies = one_by_one(plane, 1)
    path = "/update_weights_from_tensor"
    async with facade(plane) as http:
        fine(await http.post(path, json=first))
        for _ in range(2):
            error = refused(await http.get("/flush_cache"), 400)
            assert f"1 of the model's {len(bodies)} tensors have come" in error["message"]
            assert 0 < len(error["missing"]) <= min(8, len(rest))
            assert error["missing"][0] in error["message"]
        for one in rest:
            fine(await http.post(path, json=one))
        fine(await http.get("/flush_cache"))
        assert await served(http) == [(True, "one")]
    async with facade(plane, limits=FrontendLimits(held_idle_s=0.0)) as http:
        # While it is paused, the trainer says by itself when it is whole; and silence ends it.
        fine(await http.post("/pause_generation", json={}))
        caplog.clear()
        fine(await http.post(path, json=first))
        fine(await http.get("/flush_cache"))
        fine(await http.post(path, json=first))  # not twice in one: the one before is forgotten
        assert "an update is dropped" in caplog.text
        assert "1 of the model's" in caplog.text
        assert "'layers.0.weight'" in caplog.text


async def test_a_begun_update_is_known_to_every_frontend_until_it_ends_or_expires(plane: Plane) -> None:
    """The update ends by its end call, by `continue_generation`, or by silence. Later parts without a begin call are
    committed with the last part."""
    plane.spawn_copies(2)
    *parts, last = one_by_one(plane, 1)
    path = "/update_weights_from_tensor"
    async with facade(plane) as one, facade(plane) as other:
        fine(await one.post("/begin_weight_update", json={}))
        for part in (*parts, last):
            assert "have come" in fine(await other.post(path, json=part))["message"]
        error = refused(await other.get("/flush_cache"), 400)
        assert ("is whole" in error["message"], "end_weight_update" in error["fix"]) == (True, True)
        assert await served(one) == [(True, "initial")] * 2
        assert fine(await other.post("/end_weight_update", json={}))["weight_version"] == "one"

        async def send(label: str) -> None:
            for part in parts:
                fine(await one.post(path, json={**part, "weight_version": label}))
            assert fine(await one.post(path, json={**last, "weight_version": label}))["weight_version"] == label
            fine(await one.get("/flush_cache"))

        await send("ended")
        fine(await one.post("/begin_weight_update", json={}))
        fine(await other.post("/continue_generation", json={}))
        await send("continued")
    async with facade(plane, limits=FrontendLimits(session_idle_s=0)) as one:
        fine(await one.post("/begin_weight_update", json={}))
        await send("silent")
        assert await served(one) == [(True, "silent")] * 2


async def test_an_update_that_an_older_frontend_has_begun_can_continue(plane: Plane) -> None:
    """The older frontend's entry does not say which parts were sent."""
    plane.spawn()
    client = await plane.client()
    entry = json.dumps({"begun_until": time.time() + SESSION_IDLE_S, "pause": ""}).encode()
    async with facade(plane) as http:
        await client.bus.put((await client.view()).subjects.state, OPENED, entry)
        assert (
            "have come"
            in fine(await http.post("/update_weights_from_tensor", json=tensors_of(plane, 1)))["message"]
        )
        assert fine(await http.post("/end_weight_update", json={}))["weight_version"] == "one"
