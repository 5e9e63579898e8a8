"""Sends recorded rollouts to a fleet again, and compares the tokens and logprobs. `call` sends one body."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_plane.errors import InvalidRequest, PlaneError

log = logging.getLogger("rl_plane.rollouts.replay")

FORMAT = 1
"""The format of records that this module reads."""
AT_ONCE = 8
"""Requests under way. A replay checks a fleet, and is not to fill it."""
MAX_LINE_BYTES = 1 << 28
"""A record of a million tokens with logprobs has a tenth of this."""
PATTERN = "rollouts-*.jsonl"

Call = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Sends a body of `POST /v1/completions`, and returns the reply. Raises PlaneError."""
Verdict = Literal["equal", "differs", "other_weights", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The comparison of one record with a new completion."""

    id: str
    verdict: Verdict
    """`equal`: the tokens are the same. `differs`: they are not, and the same weights made both. `other_weights`: other
    weights made them. `skipped`: a second time must give other tokens. `failed`: the fleet gave an error."""
    why: str = ""
    """Why the record was skipped, or the error. Empty: it was compared."""
    tokens: int = 0
    """The tokens that are equal from the first one on."""
    of_tokens: int = 0
    """The tokens of the record."""
    largest_difference: float | None = None
    """The largest absolute difference of a logprob of the equal tokens. None: one of the two has no logprobs."""

    def to_wire(self) -> dict[str, Any]:
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) not in ("", None)}


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, or of all files of a folder, the oldest first, as they are at the call: a frontend that
    records a replay would make it endless. A last line that was cut off counts as absent, and so does a file of the
    folder that the frontend has deleted since.

    Raises:
        InvalidRequest: another line is no record, or has a later format; or there is no such file.
    """
    if not path.exists():
        raise InvalidRequest(f"there is no {path}", field="PATH", fix="name a file or a folder that is there")
    files = sorted(path.glob(PATTERN)) if path.is_dir() else [path]
    if not files:
        raise InvalidRequest(f"{path} has no records", field="PATH", fix=f"name a folder with files {PATTERN}")
    sizes = [(file, size) for file in files if (size := _size_of(file)) is not None]
    return itertools.chain.from_iterable(_records_of(file, size) for file, size in sizes)


def _size_of(file: Path) -> int | None:
    """The bytes of a file. None: it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_size
    return None


def _records_of(file: Path, size: int) -> Iterator[dict[str, Any]]:
    """The records in the first `size` bytes of a file. A file that is gone has none."""
    try:
        lines = file.open("rb")
    except FileNotFoundError:
        log.warning("%s is gone, because a frontend has made room for new records", file)
        return
    with lines:
        for number in itertools.count(1):
            line = lines.readline(min(MAX_LINE_BYTES, size - lines.tell()))
            if not line:
                return
            if not line.endswith(b"\n"):
                log.warning("%s:%d is cut off, and is left out", file, number)
                return
            try:
                record = json.loads(line)
                known = isinstance(record, dict) and record["format"] == FORMAT
                complete = known and record.keys() >= {"id", "outcome", "body", "token_ids", "weight_versions"}
            except (ValueError, LookupError):
                complete = False
            if not complete:
                raise InvalidRequest(
                    f"{file}:{number} is no record of format {FORMAT}",
                    field="PATH",
                    fix="name a file that `rl-plane frontend --record` of this version has written",
                )
            yield record


def replay(records: Iterable[Mapping[str, Any]], call: Call, most: int) -> Iterator[Replayed]:
    """Sends the first `most` records again, some at once. Yields the comparisons in the order of the records."""
    left = itertools.islice(records, most)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="replay") as pool:
        while group := list(itertools.islice(left, AT_ONCE)):
            yield from pool.map(lambda record: replay_one(record, call), group)


def replay_one(record: Mapping[str, Any], call: Call) -> Replayed:
    """Sends one record again. It never raises a PlaneError."""
    name, made = str(record["id"]), record["token_ids"]
    why = why_skipped(record)
    if why:
        return Replayed(name, "skipped", why, of_tokens=len(made))
    body = {**record["body"], "prompt_token_ids": record["prompt_token_ids"], "return_token_ids": True}
    body.pop("truncate_prompt_tokens", None)  # the prompt in the record is cut already
    if record["finish_reason"] == "length":
        body["max_tokens"] = len(made)  # a request without a length ends where the context is full
    try:
        choice = call(body)["choices"][0]
        again, versions = list(choice["token_ids"]), versions_of(choice)
    except PlaneError as error:
        return Replayed(name, "failed", error.message, of_tokens=len(made))
    except (LookupError, TypeError) as error:
        return Replayed(name, "failed", f"the reply is no completion: {error!r}", of_tokens=len(made))
    return compare(record, again, (choice.get("logprobs") or {}).get("token_logprobs"), versions)


def why_skipped(record: Mapping[str, Any]) -> str:
    """Why a second completion can't be compared. Empty: it can."""
    body = record["body"]
    if record["outcome"] != "ok" or record.get("finish_reason") not in ("stop", "length"):
        return "it did not end by itself"
    if not record.get("prompt_token_ids"):
        return "its prompt's tokens are not known"
    if not record["token_ids"]:
        return "it has no tokens"
    if body.get("temperature", 1.0) != 0:
        if "seed" not in body:
            return "it was sampled without a seed"
        if record.get("instances"):
            return "another worker has continued it, with another seed"
    return ""


def compare(
    record: Mapping[str, Any], again: list[int], logprobs: list[float] | None, versions: set[str]
) -> Replayed:
    """Compares a record with the tokens, logprobs and versions of a second completion."""
    made, before = record["token_ids"], record.get("logprobs")
    equal = next((at for at, (one, other) in enumerate(zip(made, again, strict=False)) if one != other), None)
    equal = min(len(made), len(again)) if equal is None else equal
    is_equal = made == again
    difference = None
    if before and logprobs and equal:
        pairs = zip(before[:equal], logprobs[:equal], strict=False)
        difference = max(abs(one - other) for one, other in pairs)
        difference = difference if math.isfinite(difference) else None
    same_weights = versions == versions_of(record)
    verdict: Verdict = "other_weights" if not same_weights else "equal" if is_equal else "differs"
    return Replayed(str(record["id"]), verdict, "", equal, len(made), difference)


def versions_of(choice: Mapping[str, Any]) -> set[str]:
    """The weights that made a choice: the digests of its spans, with those of their adapters."""
    spans = choice.get("weight_versions") or (choice.get("nvext") or {}).get("weight_versions") or ()
    return {f"{span.get('digest')} {(span.get('adapter') or {}).get('digest')}" for span in spans}
