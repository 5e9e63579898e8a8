"""Updates of a real fleet that is paused, or that has disabled workers: both stay so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rl_plane.errors import (
    InvalidRequest,
    NotFound,
    PlaneError,
    UpdateAborted,
)
from tests.support.faults import Stream
from tests.support.fleet_updates import (
    all_serve,
    generated,
    paused,
    states,
    update_of,
)

if TYPE_CHECKING:
    from tests.conftest import Plane


async def test_a_paused_fleet_stays_paused_over_an_update(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn_copies(2)
    await fleet.run("pause", {"mode": "keep"})
    await fleet.run("update_weights", update_of(plane.model(1), "one"))
    assert await paused(fleet.client) == [True, True]
    joiner = plane.spawn()
    assert (await states(fleet.client))[joiner.instance_id]["pause"]["paused"]
    await fleet.run("resume")
    assert await paused(fleet.client) == [False, False, False]
    assert await all_serve(fleet.client, "one")


async def test_keep_pause_leaves_the_fleet_paused(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn()
    await fleet.run("update_weights", update_of(plane.model(1), "one", keep_pause=True))
    joiner = plane.spawn()
    assert await paused(fleet.client) == [True, True]
    assert (await states(fleet.client))[joiner.instance_id]["pause"]["lease_left_s"] > 0
    await fleet.run("resume")
    assert await paused(fleet.client) == [False, False]


FROZEN_WHEN_LABELLED = """
import worker.engines.fake.adapter as fake
really = fake.FakeEngine.set_version
def set_version(self, version):
    if version.sequence and not self.gate.is_paused:
        Path({folder!r}, "ran").touch()
    really(self, version)
fake.FakeEngine.set_version = set_version
"""


async def test_equal_bytes_are_labelled_when_the_worker_is_paused(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn(patch=FROZEN_WHEN_LABELLED.format(folder=str(plane.tmp)))
    await fleet.run("update_weights", update_of(plane.model(0), "same bytes", keep_pause=True))
    assert await paused(fleet.client) == [True]
    assert await all_serve(fleet.client, "same bytes")
    assert not (plane.tmp / "ran").exists()


NO_TIME_TO_FREEZE = """
import worker.reconcile.follower
worker.reconcile.follower.FREEZE_S = 0.0
"""


@pytest.mark.parametrize("staging", ["host", "none"])
async def test_running_requests_have_as_long_as_the_policy_gives_them(plane: Plane, staging: str) -> None:
    """Not as long as a worker that changes by itself."""
    fleet = await plane.fleet()
    worker = plane.spawn(patch=NO_TIME_TO_FREEZE, token_delay_s=0.01)
    stream = Stream(fleet.client, worker.instance_id, [5, 6], 60)
    await stream.more()
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one", staging=staging, pause_mode="wait"))
    assert reply["excluded"] == []
    await stream.end()
    assert (stream.finish_reason, [span["version"] for span in stream.spans]) == ("length", ["initial"])
    assert await all_serve(fleet.client, "one")


async def test_an_unstaged_update_gives_up_running_requests_with_its_deadline(plane: Plane) -> None:
    fleet = await plane.fleet()
    worker = plane.spawn(token_delay_s=0.01)
    stream = Stream(fleet.client, worker.instance_id, [5, 6], 3000)
    await stream.more()
    slow = update_of(plane.model(1), "one", staging="none", pause_mode="wait", prepare_timeout_s=0.5)
    with pytest.raises(UpdateAborted):
        await fleet.run("update_weights", slow)
    await stream.more()
    assert await all_serve(fleet.client, "initial")
    await fleet.run("update_weights", update_of(plane.model(1), "one", staging="none"))
    await stream.until(spans=2)
    stream.stop()


CUT_OFF = """
import asyncio, worker.engines.fake.adapter as fake
really, asked = fake.FakeEngine.resume, []
async def resume(self):
    await really(self)
    if not asked:
        asked.append(True)
        await asyncio.Event().wait()
fake.FakeEngine.resume = resume
"""


@pytest.mark.parametrize("staging", ["host", "none"])
async def test_an_engine_that_a_cut_off_resume_has_reached_is_paused_for_a_swap(
    plane: Plane, staging: str
) -> None:
    """The worker says that it is paused, and its engine runs."""
    fleet = await plane.fleet()
    worker = plane.spawn(patch=CUT_OFF)
    await fleet.run("pause")
    with pytest.raises(PlaneError):
        await fleet.client.call(worker.instance_id, "resume", timeout_s=0.5)
    assert await paused(fleet.client) == [True]
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one", staging=staging))
    assert reply["excluded"] == []
    assert await paused(fleet.client) == [True]
    assert await all_serve(fleet.client, "one")
    await fleet.run("resume")
    assert len(await generated(fleet.client, worker.instance_id, [5, 6], 4)) == 4


async def test_a_pause_ends_with_its_lease(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn()
    await fleet.run("pause", {"lease_s": 3})
    assert await paused(fleet.client) == [True]

    async def running() -> bool:
        return await paused(fleet.client) == [False]

    await plane.until(running)
    late = plane.spawn()
    assert not (await states(fleet.client))[late.instance_id]["pause"]["paused"]


async def test_a_disabled_worker_takes_updates_and_stays_disabled(plane: Plane) -> None:
    fleet = await plane.fleet()
    one, other = plane.spawn_many(2)
    await fleet.run("disable", {"workers": [one.instance_id]})
    reply = await fleet.run("update_weights", update_of(plane.model(1), "one"))
    assert reply["version"]["label"] == "one"
    found = await states(fleet.client)
    assert found[one.instance_id]["admission"] == {"open": False, "reasons": ["disabled"]}
    assert found[one.instance_id]["applied_weight_version"] == "one"
    assert found[other.instance_id]["admission"]["open"]
    await fleet.run("enable", {"workers": [one.instance_id]})
    assert await all_serve(fleet.client, "one")


async def test_a_disabled_worker_stays_so_when_its_process_is_replaced(plane: Plane) -> None:
    fleet = await plane.fleet()
    one = plane.spawn()
    await fleet.run("disable", {"workers": [one.instance_id]})
    one.kill()
    again = plane.spawn(instance_id=one.instance_id)
    found = await states(fleet.client)
    assert found[again.instance_id]["admission"]["reasons"] == ["disabled"]


async def test_enable_names_its_workers(plane: Plane) -> None:
    fleet = await plane.fleet()
    plane.spawn()
    with pytest.raises(InvalidRequest) as caught:
        await fleet.run("enable")
    assert caught.value.facts["field"] == "workers"
    with pytest.raises(NotFound):
        await fleet.run("disable", {"workers": ["0" * 16]})
