"""The counts of received bytes, and the words in which a worker says what its update waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plane.protocol.update_requests import ReceiveRequest
from worker.receive.received_bytes import ByteCount, ReceivedBytes
from worker.reconcile.receive_report import update_on_worker


def request_by(backend: str, **transport: object) -> ReceiveRequest:
    return ReceiveRequest.model_validate(
        {"update_id": "u", "label": "one", "transport": {"backend": backend, **transport}}
    )


def test_another_process_reads_the_counts_through_the_file(tmp_path: Path) -> None:
    assert ReceivedBytes.watched(tmp_path) is None, "the receiver has not begun"
    here = ReceivedBytes.shared(tmp_path)
    there = ReceivedBytes.watched(tmp_path)
    assert there is not None
    assert there.now() == ByteCount(0, 0, 0.0, 0.0)
    here.begin(100)
    here.came(30)
    here.came(20)
    here.expect(10)
    found = there.now()
    assert (found.received, found.expected) == (50, 110)
    assert found.since_progress_s >= 0
    here.begin(7)
    assert (there.now().received, there.now().expected) == (0, 7)
    assert there.now().rate is None


def test_the_rate_is_of_the_time_in_which_bytes_came() -> None:
    assert ByteCount(100, 200, 9.0, 4.0).rate == 25
    assert ByteCount(0, 200, 9.0, 0.0).rate is None


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("gloo", "the trainer's bytes"),
        ("nixl", "the trainer's bytes"),
        ("filesystem", "the bytes of its files"),
        ("object_store", "the bytes that NATS stores"),
        ("carrier_pigeon", "the bytes of carrier_pigeon"),
    ],
)
def test_bytes_that_do_not_come_are_named(backend: str, words: str) -> None:
    found = update_on_worker(request_by(backend), ByteCount(5, 20, 19.0, 2.0), 30.0)
    assert (found["waits_for"], found["bytes"], found["total_bytes"]) == (words, 5, 20)
    assert (found["since_progress_s"], found["elapsed_s"]) == (19.0, 30.0)
    assert (found["update_id"], found["label"], found["transport"]) == ("u", "one", backend)


def test_each_other_wait_has_words() -> None:
    request, some, all_of_it = request_by("gloo"), ByteCount(5, 20, 1.0, 1.0), ByteCount(20, 20, 1.0, 1.0)
    waits = [
        update_on_worker(request, None, 1.0),
        update_on_worker(request, some, 1.0, opened=False),
        update_on_worker(request, some, 1.0, held=True),
        update_on_worker(request_by("gloo", in_parts=True), some, 1.0),
        update_on_worker(request, all_of_it, 1.0),
        update_on_worker(request, all_of_it, 1.0, staged_bytes=20),
    ]
    assert [one["waits_for"] for one in waits] == [
        "the start of the transport",
        "the start of the transport",
        "the swap of the version before",
        "the trainer's next part",
        "its own check of the weights",
        "the coordinator's decision",
    ]
    assert waits[0]["total_bytes"] is None
    assert waits[-1]["bytes"] == waits[-1]["total_bytes"] == 20
