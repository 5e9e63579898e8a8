"""SGLang's answer to a checksum, of workers with several ranks."""

from __future__ import annotations

import hashlib
from typing import Any

from frontend.dialects.sglang.weights_checker import checksum_of_rank, ranks_of_one_engine


def worker(name: str, ranks: int) -> dict[str, Any]:
    rows = [{"rank": rank, "checksum": "blake3:0", "checksums": {"w": f"{name}{rank}"}} for rank in range(ranks)]
    return {"instance_id": name, "ranks": rows}


def test_each_rank_of_the_fleet_has_its_place() -> None:
    described = {"a": {"tp_size": 2, "pp_size": 2}, "b": {"tp_size": 1, "pp_size": 1}}
    found = ranks_of_one_engine([worker("a", 4), worker("b", 1)], described)
    places = [one["parallelism_info"][0] for one in found]
    assert [one["rank"] for one in places] == [0, 1, 2, 3, 4]
    assert [(one["dp_rank"], one["pp_rank"], one["tp_rank"]) for one in places] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
    ]
    assert {(one["size"], one["dp_size"], one["role"]) for one in places} == {(5, 2, "target")}
    assert [(one["tp_size"], one["pp_size"]) for one in places] == [(2, 2)] * 4 + [(1, 1)]
    assert [one["instance_id"] for one in found] == ["a"] * 4 + ["b"]


def test_the_checksum_of_a_rank_is_sglangs() -> None:
    expected = hashlib.sha256(b"a1b2").hexdigest()
    assert checksum_of_rank({"b": "2", "a": "1"}) == expected
    assert checksum_of_rank({"a": "2", "b": "1"}) != expected
