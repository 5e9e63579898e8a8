"""A worker takes weights from other workers that live."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plane.errors import BusUnreachable, Conflict, Unavailable
from rl_plane.membership.core import Member
from rl_plane.protocol.subjects import MEMBER_PREFIX, Entry, KeyValueBucket, Subjects
from worker.reconcile.peers import Peers

BOUND_S = 30.0
OWN = "w0"
SUBJECTS = Subjects("n", "c")


class Store:
    """A Bus with the offers and the members of a fleet."""

    name = OWN

    def __init__(self) -> None:
        self._offers: list[Entry] = []
        self._members: dict[str, Entry] = {}

    def offer(self, worker: str, host: str, *, lives: bool = True) -> None:
        """Adds a worker that offers `d`. Without `lives` it was killed."""
        transport = {"backend": "road", "host": worker}
        offer = {
            "places": [{"digest": "d", "transport": transport}],
            "host": host,
            "incarnation": f"{worker} 1",
        }
        self._offers.append(Entry(worker, json.dumps(offer).encode(), 1))
        if lives:
            self.join(worker, f"{worker} 1")

    def join(self, worker: str, incarnation: str) -> None:
        record = Member(worker, incarnation, "server", 1, 1, {}).to_record()
        self._members[MEMBER_PREFIX + worker] = Entry(MEMBER_PREFIX + worker, record, 1)

    async def bucket_exists(self, bucket: KeyValueBucket) -> bool:
        return True

    async def list_keys(self, bucket: KeyValueBucket, keys: str) -> list[Entry]:
        assert bucket == SUBJECTS.offers
        return self._offers

    async def get(self, bucket: KeyValueBucket, key: str) -> Entry | None:
        assert bucket == SUBJECTS.members
        return self._members.get(key)


def peers_of(store: Any) -> Peers:
    engine: Any = None
    return Peers(store, SUBJECTS, engine, ["road"], "A", f"{OWN} 1", lambda: ())


class Road:
    """Takes weights from the workers `there`. Others can't be reached."""

    def __init__(self, *there: str) -> None:
        self._there = there
        self.asked: list[str] = []

    async def take(self, transport: Mapping[str, Any]) -> None:
        self.asked.append(transport["host"])
        if transport["host"] not in self._there:
            raise Unavailable("the connection was refused")


async def test_dead_workers_of_the_same_host_do_not_keep_a_worker_from_healing() -> None:
    store, road = Store(), Road("w5", "w6")
    for number in range(1, 5):
        store.offer(f"w{number}", "A", lives=False)
    for number in (5, 6):
        store.offer(f"w{number}", "B")
    assert await peers_of(store).bring("d", road.take)
    assert road.asked == ["w5"]


async def test_the_offer_of_an_earlier_incarnation_does_not_count() -> None:
    store, road = Store(), Road("w5")
    for number in range(1, 5):
        store.offer(f"w{number}", "A", lives=False)
        store.join(f"w{number}", f"w{number} 2")
    store.offer("w5", "B")
    assert await peers_of(store).bring("d", road.take)
    assert road.asked == ["w5"]


async def test_a_worker_asks_three_peers_that_live_and_no_more() -> None:
    store, road = Store(), Road()
    for number in range(1, 6):
        store.offer(f"w{number}", "B")
    assert not await peers_of(store).bring("d", road.take)
    assert road.asked == ["w1", "w2", "w3"]


async def test_a_peer_is_not_blamed_for_an_update_that_is_in_the_way() -> None:
    store, asked = Store(), []
    for number in range(1, 4):
        store.offer(f"w{number}", "A")

    async def take(transport: Mapping[str, Any]) -> None:
        asked.append(transport["host"])
        raise Conflict("waiting for the update u")

    with pytest.raises(Conflict, match="waiting for the update u"):
        await peers_of(store).bring("d", take)
    assert asked == ["w1"]


class LosingStore(Store):
    """A store that takes offers while it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.there = True
        self.taken: list[str] = []
        self.took = asyncio.Event()

    async def ensure_bucket(self, bucket: KeyValueBucket) -> None:
        if not self.there:
            raise BusUnreachable("the connection to NATS is down")

    async def put(self, bucket: KeyValueBucket, key: str, value: bytes) -> None:
        self.taken.append(json.loads(value)["places"][0]["digest"])
        self.took.set()

    async def keep_newest(self, *asked: Any) -> None:
        """All stay."""

    async def next(self) -> None:
        async with asyncio.timeout(BOUND_S):
            await self.took.wait()
        self.took.clear()


async def test_an_offer_outlives_an_outage_and_a_lost_store() -> None:
    places = [{"digest": "d", "transport": {"backend": "road"}}]
    engine: Any = SimpleNamespace(receiver=SimpleNamespace(offer=lambda loaded: places))
    store: Any = LosingStore()
    peers = Peers(store, SUBJECTS, engine, ["road"], "A", f"{OWN} 1", lambda: ())
    store.there = False
    peers.offer()
    store.there = True
    await store.next()
    peers.offer()  # nothing has changed
    await peers.reconnected()
    await store.next()
    assert store.taken == ["d", "d"]
