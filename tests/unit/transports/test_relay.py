"""The relay of an update: its plan, the choices of one receiver, and whole fleets on a simulated network."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plane.commit.relay_plan import plan_relay, steps_back
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.relay import MAX_PEERS, TRAINER, RelayPeer, RelayPlan
from rl_plane.transports.nixl.relay_chooser import HANG_S, MORE_PATIENCE, BucketRead, Chooser
from tests.support.relay_network import GBIT, MB, Network, addresses, relayed

BUCKETS, BUCKET_BYTES = 64, 4 * MB
TOTAL = BUCKETS * BUCKET_BYTES
ALONE_S = TOTAL / GBIT
"""The time of one receiver, whose link is the limit."""


def one_per_host(hosts: int) -> dict[str, RelayPlan]:
    return plan_relay(addresses([f"h{number:03}" for number in range(hosts)]))


# ---- the plan ----


@pytest.mark.parametrize("hosts", [2, 3, MAX_PEERS + 1, MAX_PEERS + 2, 100, 1000])
def test_each_worker_has_a_share_and_is_read_as_often_as_any_other(hosts: int) -> None:
    plans = one_per_host(hosts)
    assert sorted(plan.share for plan in plans.values() if plan.share is not None) == list(range(hosts))
    readers = dict.fromkeys(plans, 0)
    for name, plan in plans.items():
        assert plan.worker == name
        assert plan.shares == hosts
        assert 1 <= len(plan.peers) <= MAX_PEERS
        assert name not in {peer.worker for peer in plan.peers}
        for peer in plan.peers:
            assert peer.share == plans[peer.worker].share
            readers[peer.worker] += 1
    assert len(set(readers.values())) == 1, readers
    assert plans == one_per_host(hosts)


def test_every_bucket_reaches_every_worker_of_a_large_fleet_in_few_steps() -> None:
    steps = steps_back(200)
    assert len(steps) <= MAX_PEERS
    reached, rounds = {0}, 0
    while len(reached) < 200:
        reached |= {(one + step) % 200 for one in reached for step in steps}
        rounds += 1
    assert rounds <= 8


def test_one_worker_of_each_host_reads_over_the_network() -> None:
    workers = addresses(["b", "a", "b", "a", "b"])
    plans = plan_relay(workers)
    assert {name: plan.share for name, plan in plans.items()} == {
        "w000": 1, "w001": 0, "w002": None, "w003": None, "w004": None,
    }  # fmt: skip
    assert [peer.worker for peer in plans["w000"].peers] == ["w001"]
    assert [peer.worker for peer in plans["w004"].peers] == ["w000", "w001"], "the one on its own host first"
    assert plans["w004"].peers[0].address == workers["w000"]["address"]


def test_on_one_host_the_first_worker_serves_the_others() -> None:
    plans = plan_relay(addresses(["a", "a", "a"]))
    assert [plan.share for plan in plans.values()] == [0, None, None]
    assert [[peer.worker for peer in plan.peers] for plan in plans.values()] == [["w001"], ["w000"], ["w000"]]


def test_a_relay_of_one_worker_is_not_planned() -> None:
    assert plan_relay(addresses(["a"])) == {}


def test_a_plan_crosses_the_wire_and_is_checked() -> None:
    plan = one_per_host(4)["w002"]
    assert RelayPlan.model_validate(plan.model_dump()) == plan
    with pytest.raises(InvalidRequest) as refused:
        RelayPlan(worker="a", share=2, shares=2, peers=())
    assert refused.value.facts["field"] == "relay.share"


# ---- one receiver ----


def chooser(share: int | None = 0, peers: int = 2, buckets: int = 6) -> Chooser:
    """A receiver of share 0 with peers p1, p2, … of the shares 1, 2, …"""
    found = tuple(RelayPeer(worker=f"p{n}", address="a", port=1, share=n) for n in range(1, peers + 1))
    return Chooser(RelayPlan(worker="me", share=share, shares=peers + 1, peers=found), [MB] * buckets, 0.0)


def test_the_own_share_comes_from_the_trainer_and_the_rest_from_peers() -> None:
    one = chooser()
    assert one.next(0.0) == BucketRead(0, TRAINER)
    assert one.next(0.0) is None, "one read at a time from each source"
    one.announced("p1", [1, 0])
    one.announced("p2", [1, 2])
    reads = [one.next(0.1), one.next(0.1)]
    assert reads == [BucketRead(1, "p1"), BucketRead(2, "p2")], "not 0, which is in flight, and 1 only once"
    one.arrived(BucketRead(0, TRAINER), 0.2)
    one.verified(BucketRead(0, TRAINER))
    assert one.next(0.2) == BucketRead(3, TRAINER)
    one.arrived(BucketRead(1, "p1"), 0.3)
    assert one.next(0.3) is None, "a bucket that is being verified is not read again"
    one.verified(BucketRead(1, "p1"))
    assert [use["source"] for use in one.uses()] == ["p1", TRAINER]
    assert not one.done


def test_another_peer_delivers_the_bucket_of_a_lost_peer() -> None:
    one = chooser()
    one.next(0.0)
    one.announced("p1", [1, 4])
    one.announced("p2", [1])
    assert one.next(0.0) == BucketRead(1, "p1")
    assert one.next(0.0) is None
    one.failed("p1")
    one.failed("p1")
    assert one.next(0.0) == BucketRead(1, "p2")
    one.announced("p1", [2])
    assert one.next(0.0) is None, "a lost peer is not asked again"


def test_without_peers_the_trainer_gives_everything_at_once() -> None:
    one = chooser()
    for peer in ("p1", "p2"):
        one.failed(peer)
    seen = []
    while not one.done:
        read = one.next(0.0)
        assert read is not None
        seen.append(read)
        one.arrived(read, 0.0)
        one.verified(read)
    assert {read.source for read in seen} == {TRAINER}
    assert sorted(read.bucket for read in seen) == list(range(6))


def test_a_receiver_waits_for_its_peers_before_it_takes_their_shares() -> None:
    """Bucket 1 is this receiver's part of the share of p1, and bucket 7 is the part of p2."""
    one = chooser(buckets=9)
    for bucket in (0, 3, 6):
        finish(one, BucketRead(bucket, TRAINER), 0.0, 0.2)
    one.announced("p1", [4])
    one.announced("p2", [2, 5, 8])
    finish(one, BucketRead(4, "p1"), 0.2, 0.4)
    finish(one, BucketRead(2, "p2"), 0.4, 0.6)
    finish(one, BucketRead(5, "p2"), 0.6, 0.8)
    finish(one, BucketRead(8, "p2"), 0.8, 1.0)
    patience_s = 2 * 0.2
    assert one.next(1.0 + patience_s - 0.01) is None
    finish(one, BucketRead(1, TRAINER), 1.0 + patience_s + 0.01, 1.5)
    assert one.next(1.0 + MORE_PATIENCE * patience_s - 0.01) is None, "the other one is the part of a peer"
    finish(one, BucketRead(7, TRAINER), 1.0 + MORE_PATIENCE * patience_s + 0.01, 9.0)
    assert one.done


def test_a_receiver_does_not_wait_for_a_share_of_which_no_peer_has_much() -> None:
    one = chooser(buckets=9)
    for bucket in (0, 3, 6):
        finish(one, BucketRead(bucket, TRAINER), 0.0, 0.2)
    one.announced("p2", [2])
    finish(one, BucketRead(2, "p2"), 0.2, 0.4)
    finish(one, BucketRead(1, TRAINER), 0.4, 0.6)


def finish(one: Chooser, read: BucketRead, begins: float, ends: float) -> None:
    """The receiver begins this read, and none other, and gets the bucket."""
    assert one.next(begins) == read
    one.arrived(read, ends)
    one.verified(read)


def test_a_peer_that_hangs_is_found_by_its_silence() -> None:
    one = chooser()
    one.announced("p1", [1])
    one.next(0.0)
    assert one.next(0.0) == BucketRead(1, "p1")
    one.progressed(BucketRead(1, "p1"), 3.0)
    assert one.hanging(3.0 + HANG_S) == []
    assert one.hanging(3.1 + HANG_S) == ["p1"]


def test_another_peer_replaces_a_slow_peer_while_its_read_continues() -> None:
    one = chooser(peers=3, buckets=32)
    one.next(0.0)
    for peer in ("p1", "p2"):
        one.announced(peer, [1])
    one.announced("p3", [3, 7, 11, 15])
    assert one.next(0.0) == BucketRead(1, "p1")
    for number, bucket in enumerate((3, 7, 11, 15)):
        read = one.next(0.1 * number)
        assert read == BucketRead(bucket, "p3")
        one.arrived(read, 0.1 * (number + 1))
        one.verified(read)
    assert one.next(0.45) is None
    assert one.next(0.55) == BucketRead(1, "p2"), "p1 takes more than five times as long as p3"
    one.arrived(BucketRead(1, "p2"), 0.6)
    one.verified(BucketRead(1, "p2"))
    one.arrived(BucketRead(1, "p1"), 0.7)
    one.superseded(BucketRead(1, "p1"))
    assert not one.is_missing(1)
    one.announced("p1", [2])
    assert one.next(0.7) == BucketRead(2, "p1"), "no peer is slow for ever"


def test_a_bucket_that_the_trainer_sends_slowly_comes_from_a_peer_that_has_it() -> None:
    one = chooser(peers=2, buckets=32)
    slow = one.next(0.0)
    assert slow is not None
    assert slow.source == TRAINER
    one.announced("p1", [1, 4, 7, 10, slow.bucket])
    for number in range(4):
        read = one.next(0.1 * number)
        assert read is not None
        assert read.source == "p1"
        one.arrived(read, 0.1 * (number + 1))
        one.verified(read)
    assert one.next(0.45) is None
    assert one.next(0.55) == BucketRead(slow.bucket, "p1")


# ---- fleets ----


def seconds(found: Network, *without: str) -> float:
    """The time in which every receiver, but for those named, has everything; 1 is that of one receiver alone."""
    return max(at for name, at in found.ended.items() if name not in without) / ALONE_S


@pytest.mark.parametrize(("hosts", "most"), [(2, 1.1), (4, 1.2), (8, 1.3), (16, 1.6), (32, 2.3)])
def test_many_hosts_take_nearly_the_time_of_one(hosts: int, most: float) -> None:
    found = relayed(hosts, BUCKETS, BUCKET_BYTES)
    assert len(found.ended) == hosts
    assert seconds(found) < most
    assert found.sent[TRAINER] < 1.06 * TOTAL
    if hosts <= 9:
        assert found.sent[TRAINER] == pytest.approx(TOTAL), "the trainer sends each byte once"
    assert max(found.received.values()) == pytest.approx(TOTAL), "each link brings each byte once"
    assert max(sent for name, sent in found.sent.items() if name != TRAINER) < 1.05 * TOTAL


@pytest.mark.parametrize("at", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("what", ["dies", "stops"])
def test_a_death_or_a_hang_in_the_middle_delays_the_others_little(what: str, at: float) -> None:
    how: dict[str, Any] = {what: {"w003": at * ALONE_S}}
    found = relayed(8, BUCKETS, BUCKET_BYTES, **how)
    assert len(found.ended) == 7
    assert seconds(found) < 2.0


def test_several_deaths_leave_the_others_complete() -> None:
    found = relayed(8, BUCKETS, BUCKET_BYTES, dies={f"w00{n}": 0.2 * n * ALONE_S for n in range(1, 7)})
    assert set(found.ended) >= {"w000", "w007"}


@pytest.mark.parametrize(("hosts", "most"), [(2, 1.9), (3, 1.7), (4, 1.5), (8, 1.5), (16, 1.7)])
def test_a_slow_link_holds_no_other_host_up(hosts: int, most: float) -> None:
    found = relayed(hosts, max(BUCKETS, 8 * hosts), TOTAL // max(BUCKETS, 8 * hosts), slow={"w001": 10.0})
    assert seconds(found, "w001") < most
    assert found.ended["w001"] / ALONE_S < 12


def test_wrong_bytes_are_never_passed_on() -> None:
    found = relayed(8, BUCKETS, BUCKET_BYTES, wrong=frozenset({"w003"}))
    assert len(found.ended) == 8
    assert seconds(found) < 1.6


def test_two_workers_of_one_host_receive_each_byte_once_over_the_network() -> None:
    plans = plan_relay(addresses(["a", "a", "b", "b"]))
    found = Network(plans, [BUCKET_BYTES] * BUCKETS)
    found.run()
    assert found.sent[TRAINER] == pytest.approx(TOTAL)
