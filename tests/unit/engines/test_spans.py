"""Spans: when a delta reports them, from an engine to a reader of joined deltas."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from rl_plane.errors import EngineFailed
from rl_plane.protocol.generation import GenerateDelta, VersionSpan
from rl_plane.protocol.routed_experts import RoutedExperts
from rl_plane.protocol.token_batching import merged
from rl_plane.protocol.versions import WeightVersion
from tests.support.engine_runs import ask
from worker.engines.common.pieces import Piece, PieceQueue
from worker.engines.common.spans import Label, SpanLog
from worker.engines.sglang.streams import Experts, SglangStream


def version(sequence: int) -> WeightVersion:
    return WeightVersion("run", sequence, f"step_{sequence}", f"blake3:{sequence:064d}")


BASE, NEXT = Label(version(0)), Label(version(1))
LORA, OTHER = Label(version(0), "x", version(5)), Label(version(0), "x", version(6))
UNKNOWN, UNKNOWN_LORA = Label(None), Label(version(0), "x", None)
UNKNOWN_BASE = Label(None, "x", version(5))


def shown(spans: list[VersionSpan]) -> list[tuple[int | None, int | None, int, int]]:
    return [
        (span.sequence, span.adapter.sequence if span.adapter else None, span.start, span.end) for span in spans
    ]


def told(*labels: Label) -> list[list[tuple[int | None, int | None, int, int]]]:
    """The spans of one delta per token, then of a last one without tokens."""
    log, found = SpanLog(), []
    for label in labels:
        log.add(label)
        found.append(shown(log.tell(last=False)))
    return [*found, shown(log.tell(last=True))]


def test_spans_are_reported_first_at_each_new_span_and_last() -> None:
    assert told(BASE, BASE, NEXT, NEXT, BASE) == [
        [(0, None, 0, 1)],
        [],
        [(0, None, 0, 2), (1, None, 2, 3)],
        [],
        [(0, None, 0, 2), (1, None, 2, 4), (0, None, 4, 5)],
        [(0, None, 0, 2), (1, None, 2, 4), (0, None, 4, 5)],
    ]
    assert told() == [[]]


def test_another_version_of_the_adapter_is_another_span() -> None:
    assert told(LORA, LORA, OTHER)[-1] == [(0, 5, 0, 2), (0, 6, 2, 3)]
    log = SpanLog()
    log.add(LORA)
    (span,) = log.tell(last=False)
    assert span.adapter is not None
    assert span.adapter.model_dump() == {
        "name": "x",
        "version": "step_5",
        "sequence": 5,
        "digest": version(5).digest,
    }


@pytest.mark.parametrize("unknown", [UNKNOWN, UNKNOWN_LORA, UNKNOWN_BASE])
def test_tokens_of_unknown_weights_are_in_no_span(unknown: Label) -> None:
    assert told(unknown, unknown) == [[], [], []]
    spans = told(BASE, unknown, unknown, NEXT, NEXT)
    # Said each time: a delta without spans would lengthen the last one.
    assert spans[1] == spans[2] == [(0, None, 0, 1)]
    assert spans[3] == [(0, None, 0, 1), (1, None, 3, 4)]
    assert spans[4] == []
    assert spans[5] == [(0, None, 0, 1), (1, None, 3, 5)]


def received(deltas: list[GenerateDelta]) -> list[VersionSpan]:
    """The spans that a reader knows after these deltas, by the rule of `GenerateDelta.spans`."""
    spans: list[VersionSpan] = []
    for delta in deltas:
        if delta.spans:
            spans = delta.spans
        elif spans:
            longer = spans[-1].model_copy(update={"end": spans[-1].end + len(delta.token_ids)})
            spans = [*spans[:-1], longer]
    return spans


@pytest.mark.parametrize("seed", range(40))
def test_joined_deltas_have_the_same_spans(seed: int) -> None:
    pick = random.Random(seed)
    log, deltas, labels = SpanLog(), [], [BASE]
    for number in range(30):
        labels.append(labels[-1] if pick.random() < 0.7 else pick.choice([BASE, NEXT, LORA, UNKNOWN]))
        log.add(labels[-1])
        deltas.append(GenerateDelta(token_ids=[number], text=f"{number} ", spans=log.tell(last=False)))
    end = GenerateDelta(token_ids=[], finish_reason="length", spans=log.tell(last=True))
    batches, rest = [], [*deltas, end]
    while rest:
        count = pick.randint(1, 6)
        batches.append(rest[:count])
        rest = rest[count:]
    joined = [merged(batch) for batch in batches]
    read = 0
    for number in range(1, len(joined)):  # after each: all that is known, and nothing more
        read += len(joined[number - 1].token_ids)
        exact = [
            (label.base.sequence if label.base else None, label.adapter_version and label.adapter_version.sequence)
            for label in labels[1 : read + 1]
        ]
        runs, start = [], 0
        for (base, adapter), group in itertools.groupby(exact):
            end_of_run = start + len(list(group))
            if base is not None:
                runs.append((base, adapter, start, end_of_run))
            start = end_of_run
        assert shown(received(joined[:number])) == runs
    assert received(joined) == end.spans
    assert [token for delta in joined for token in delta.token_ids] == list(range(30))
    assert "".join(delta.text for delta in joined) == "".join(delta.text for delta in deltas)
    assert joined[-1].finish_reason == "length"


async def test_a_queue_joins_tokens_of_the_same_weights_only() -> None:
    pieces = PieceQueue()
    for tokens, label in (([5], BASE), ([6], BASE), ([7], NEXT), ([8], NEXT)):
        pieces.put(Piece(tokens, [0.0], labels=[label]))
    pieces.put(EngineFailed("dead"))
    found = [await pieces.next() for _ in range(2)]
    assert [(piece.token_ids, set(piece.labels)) for piece in found] == [([5, 6], {BASE}), ([7, 8], {NEXT})]
    with pytest.raises(EngineFailed, match="dead"):
        await pieces.next()


async def test_a_queue_gives_the_end_with_the_last_tokens() -> None:
    pieces = PieceQueue()
    pieces.put(Piece([5], labels=[BASE]))
    pieces.put(Piece(finish_reason="abort"))
    piece = await pieces.next()
    assert (piece.token_ids, piece.finish_reason) == ([5], "abort")


async def test_sglang_labels_tokens_by_the_weights_that_made_them() -> None:
    stream = SglangStream(ask([1]), [1], frozenset(), Experts(1, 1, 1))

    def out(ids: list[int], count: int, finish: Any = None) -> dict[str, Any]:
        return {"output_ids": ids, "meta_info": {"completion_tokens": count, "finish_reason": finish}}

    stream.take(out([5, 6], 2), "a", BASE)
    stream.take(out([7], 3), "b", NEXT)
    stream.take(out([8], 4, {"type": "length"}), "b", NEXT)
    found = [await stream.pieces.next() for _ in range(2)]
    assert [(piece.token_ids, piece.finish_reason) for piece in found] == [([5, 6], None), ([7, 8], "length")]


def test_a_piece_is_cut_where_other_weights_made_the_next_token() -> None:
    tops = [[(token, 0.0)] for token in (5, 6, 7)]
    routed = RoutedExperts(layers=1, top_k=1, width=1, data=bytes(4))
    piece = Piece([5, 6, 7], [0.1, 0.2, 0.3], tops, [BASE, BASE, UNKNOWN], "stop", [None], routed)
    one, two = piece.by_weights()
    assert one == Piece([5, 6], [0.1, 0.2], tops[:2], [BASE, BASE], None, [None])
    assert two == Piece([7], [0.3], tops[2:], [UNKNOWN], "stop", None, routed)
    empty = Piece(finish_reason="abort")
    assert list(empty.by_weights()) == [empty]


def test_a_piece_that_a_stop_string_ends_loses_the_rows_of_the_tokens_after_it() -> None:
    routed = RoutedExperts(layers=1, top_k=1, width=1, data=bytes([1, 2, 3, 4]))
    piece = Piece([5, 6, 7], [0.1, 0.2, 0.3], labels=[BASE] * 3, routed=routed)
    cut = piece.until(2)
    assert (cut.token_ids, cut.logprobs, cut.finish_reason) == ([5, 6], [0.1, 0.2], "stop")
    assert cut.routed is not None
    assert cut.routed.data == bytes([1, 2, 3])
