"""The writer of rollout records: its files, its bounds, and a disk that refuses."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from frontend.completions.reply_choice import Choice
from frontend.completions.rollout_record import RolloutRecord
from frontend.records.record_writer import RecordWriter
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import ALL_THAT_FITS, GenerateRequest

BOUND_S = 10.0
FIRST_NS = 10**9
FIRST_FILE = "rollouts-0000000001000.jsonl"
"""The file that a writer begins at FIRST_NS."""


def record(number: int = 0, tokens: int = 3, **request: Any) -> RolloutRecord:
    choice = Choice(index=0, instance_id="a" * 16, incarnation="one", token_ids=list(range(tokens)))
    choice.logprobs, choice.finish_reason = [-0.5] * tokens, "stop"
    asked = GenerateRequest(id=f"r{number}", **{"prompt_token_ids": [5, 6], **request})
    times: dict[str, Any] = {"began_at": 1.0, "first_token_s": 0.1, "seconds": 0.2}
    return RolloutRecord(component="engine", request=asked, choice=choice, outcome="ok", **times)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def refuse(folder: Path, seconds: Iterable[int]) -> None:
    """Makes the disk refuse the files that a writer begins at these seconds."""
    for second in seconds:
        (folder / f"rollouts-{second * 1000:013d}.jsonl").symlink_to("/dev/full")


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.005)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RecordWriter]:
    found = RecordWriter(tmp_path / "records", 3)
    found.start()
    yield found
    found.close()


def test_a_record_is_one_line_with_all_that_a_replay_needs(writer: RecordWriter, tmp_path: Path) -> None:
    writer.put(
        record(temperature=0.0, seed=4, logprobs=True, top_logprobs=3, max_tokens=9, stop=["x"], adapter="a")
    )
    until(lambda: writer.counts["written"] == 1)
    (line,) = lines(tmp_path / "records")
    assert line["body"] == {
        "temperature": 0.0, "seed": 4, "logprobs": 3, "max_tokens": 9, "stop": ["x"], "model": "a",
    }  # fmt: skip
    assert (line["prompt_token_ids"], line["token_ids"], line["logprobs"]) == ([5, 6], [0, 1, 2], [-0.5] * 3)
    assert (line["id"], line["instance_id"], line["outcome"], line["format"]) == ("r0", "a" * 16, "ok", 1)
    (file,) = (tmp_path / "records").glob("*.jsonl")
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_oldest_files_go(tmp_path: Path) -> None:
    now = iter(range(0, 10**12, 10**9))
    writer = RecordWriter(tmp_path / "records", 3, file_bytes=10, clock=lambda: next(now))
    writer.start()
    for number in range(7):
        writer.put(record(number))
    until(lambda: writer.counts["written"] == 7)
    writer.close()
    assert [line["id"] for line in lines(tmp_path / "records")] == ["r4", "r5", "r6"]


def test_the_file_that_is_written_stays_if_the_clock_was_set_back(tmp_path: Path) -> None:
    now = iter(range(10**12, 0, -(10**9)))
    writer = RecordWriter(tmp_path, 2, file_bytes=10, clock=lambda: next(now))
    writer.start()
    for number in range(5):
        writer.put(record(number))
        until(lambda: writer.counts["written"] > number)  # noqa: B023
        assert f"r{number}" in {line["id"] for line in lines(tmp_path)}
    writer.close()
    assert len(lines(tmp_path)) == 2


def test_a_record_of_a_request_without_a_length_asks_for_the_tokens_that_were_made() -> None:
    assert record(tokens=7, max_tokens=ALL_THAT_FITS).to_wire()["body"]["max_tokens"] == 7
    assert record(tokens=0, max_tokens=ALL_THAT_FITS).to_wire()["body"]["max_tokens"] == 1


def test_a_record_that_does_not_fit_into_the_queue_is_dropped_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FIRST_FILE)  # a disk that takes nothing before the pipe has a reader
    writer = RecordWriter(tmp_path, 3, queued_tokens=20, clock=lambda: FIRST_NS)
    writer.start()
    for number in range(50):
        writer.put(record(number))  # 5 tokens each
    dropped = writer.counts["dropped"]
    assert 45 <= dropped <= 46  # the thread may have taken one
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lines, tmp_path)
        writer.close()
        assert writer.counts == {"written": 50 - dropped, "dropped": dropped, "failed": 0}
        assert len(found.result(BOUND_S)) == 50 - dropped
    writer.put(record())
    assert writer.counts["dropped"] == dropped + 1


@pytest.mark.parametrize("retry_s", [0.0, BOUND_S * 10])
def test_a_full_disk_gives_one_line_and_records_come_again_after_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, retry_s: float
) -> None:
    caplog.set_level(logging.INFO)
    refuse(tmp_path, range(1, 6))
    seconds = itertools.count(1)
    writer = RecordWriter(tmp_path, 3, file_bytes=1, retry_s=retry_s, clock=lambda: next(seconds) * 10**9)
    writer.start()
    for number in range(1, 6):
        writer.put(record(number))
    until(lambda: writer.counts["failed"] == 5)
    (told,) = [line.getMessage() for line in caplog.records if "lost" in line.getMessage()]
    assert "No space left on device; fix: make room there" in told
    writer.put(record(9))
    writer.close()
    for refused in tmp_path.glob("*.jsonl"):
        if refused.is_symlink():
            refused.unlink()
    assert [line["id"] for line in lines(tmp_path)] == ([] if retry_s else ["r9"])
    again = any("written again: 5 were lost" in line.getMessage() for line in caplog.records)
    assert again is (not retry_s)


def test_a_disk_that_refuses_records_costs_no_older_ones(tmp_path: Path) -> None:
    seconds = itertools.count(1)
    writer = RecordWriter(tmp_path, 3, file_bytes=1, retry_s=0.0, clock=lambda: next(seconds) * 10**9)
    writer.start()
    for number in range(1, 4):
        writer.put(record(number))
    until(lambda: writer.counts["written"] == 3)
    refuse(tmp_path, range(4, 8))
    for number in range(4, 8):
        writer.put(record(number))
    until(lambda: writer.counts["failed"] == 4 and not any(file.is_symlink() for file in tmp_path.iterdir()))
    assert [line["id"] for line in lines(tmp_path)] == ["r1", "r2", "r3"]
    writer.put(record(8))
    writer.close()
    assert [line["id"] for line in lines(tmp_path)] == ["r2", "r3", "r8"]


def test_a_folder_has_one_writer(writer: RecordWriter, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as raised:
        RecordWriter(tmp_path / "records", 3).start()
    assert (raised.value.facts["field"], raised.value.facts["fix"]) == ("record", "give each a folder of its own")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="can't record in") as raised:
        RecordWriter(tmp_path / "file" / "records", 3).start()
    assert raised.value.facts["field"] == "record"
