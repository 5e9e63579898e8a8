"""The demands of a request on the weights that make its tokens. Pure.

Versions are compared by sequence: the base's, or the adapter's if the request names one and it is newer. Demands are
checked when a worker is chosen, and again for every delta before it is delivered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import compress
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from rl_plane.commit.history import KEEP
from rl_plane.errors import DemandUnmet, InvalidRequest
from rl_plane.protocol.generation import UNKNOWN, VersionSpan
from rl_plane.protocol.record import Held

MAX_LABEL_CHARS = 256

OF_VERSIONS = ("min_version", "max_lag", "one_version")
"""The demands that need an engine which can say which weights make its tokens."""

OnStale = Literal["wait", "refuse", "cut"]


class DemandFields(BaseModel):
    """The demands in a request's body, at its top or in `nvext`."""

    min_version: int | str | None = None
    """The oldest version that may make a token: a sequence or a label, of the base or of the request's adapter."""
    max_lag: int | None = Field(None, ge=0)
    """The number of sequences that a token's version may be behind the committed one when it is delivered."""
    one_version: bool | None = None
    """One version makes all tokens of a choice."""
    on_stale: OnStale | None = None
    """The reaction to weights that do not meet the demands. Before the first token, `wait` (the default) and `cut` wait
    for a version that does, and `refuse` fails. Later, `cut` ends the choice with its tokens so far, and the others
    fail with an error that carries them."""
    migrate: bool | None = None
    """Another worker continues a choice whose worker is lost after the first token."""

    @field_validator("min_version", mode="before")
    @classmethod
    def _sequence_or_label(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
        if value is None or number or (isinstance(value, str) and 0 < len(value) <= MAX_LABEL_CHARS):
            return value
        raise ValueError(f"give a sequence number, or a label of at most {MAX_LABEL_CHARS} characters")


@dataclass(frozen=True, slots=True)
class Demands:
    """The demands of one request. The fields are those of DemandFields."""

    min_version: int | str | None = None
    max_lag: int | None = None
    one_version: bool = False
    on_stale: OnStale = "wait"
    migrate: bool = False

    @property
    def of_versions(self) -> bool:
        return self.min_version is not None or self.max_lag is not None or self.one_version

    def named(self) -> list[str]:
        """The fields of the demands on versions."""
        given = self.min_version is not None, self.max_lag is not None, self.one_version
        return list(compress(OF_VERSIONS, given))


NO_DEMANDS = Demands()


def demands_of(body: DemandFields, nvext: DemandFields | None = None) -> Demands:
    """The demands of a body and its `nvext`. A field that both give must have the same value."""
    found: dict[str, Any] = {}
    for each in fields(Demands):
        given = [
            value for one in (body, nvext) if one is not None and (value := getattr(one, each.name)) is not None
        ]
        if len(given) == 2 and given[0] != given[1]:
            raise InvalidRequest(
                f"{each.name} and nvext.{each.name} differ", field=f"nvext.{each.name}", fix="send one of the two"
            )
        if given:
            found[each.name] = given[0]
    demands = Demands(**found)
    if demands.on_stale != "wait" and not demands.of_versions:
        raise InvalidRequest(
            "on_stale without a demand",
            field="on_stale",
            fix="send min_version, max_lag or one_version too",
        )
    return demands


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the order of versions."""

    run: str
    sequence: int

    def __str__(self) -> str:
        return f"sequence {self.sequence}"


def point_of(held: Held, adapter: str | None) -> Point:
    """The place of the weights that make a request's tokens in this state."""
    newest = held.version.sequence
    if adapter is not None and (version := held.adapters.get(adapter)) is not None:
        newest = max(newest, version.sequence)
    return Point(held.version.run, newest)


def point_of_span(span: VersionSpan) -> Point | None:
    """The place of the weights of a span. None: it is unknown."""
    if span.run is None or span.sequence is None:
        return None
    return Point(span.run, max(span.sequence, span.adapter.sequence if span.adapter is not None else 0))


@dataclass(frozen=True, slots=True)
class Unmet:
    """The demand that weights do not meet, and why."""

    demand: str
    """The field."""
    message: str

    def error(self) -> DemandUnmet:
        return DemandUnmet(self.message, field=self.demand, retry_after_s=1.0)


def not_known(label: str, adapter: str | None, unread: bool) -> Unmet:
    """The demand for an unknown label. `unread`: the history could not be read."""
    of = "the base" if adapter is None else f"the base or {adapter[:64]!r}"
    words = f"no version {label[:64]!r} of {of} is known"
    if unread:
        return Unmet("min_version", f"{words}, and the history of older ones could not be read")
    words += f": it is none of the last {KEEP} updates'"
    return Unmet("min_version", f"{words}; an older one is named by its sequence")


def at_admission(demands: Demands, serves: Point, committed: Point, made_by: Point | None = None) -> Unmet | None:
    """The demand that a worker which serves this version does not meet for the next token. `made_by`: the version of
    the tokens so far. The caller has replaced a label in `min_version` by its sequence."""
    oldest = demands.min_version
    assert not isinstance(oldest, str), "labels have no order"
    if demands.one_version and made_by is not None and serves != made_by:
        return Unmet("one_version", f"{serves} is served, and the tokens so far were made by {made_by}")
    if oldest is not None and serves.run != committed.run:
        return Unmet("min_version", f"{serves} is of another run")
    if oldest is not None and serves.sequence < oldest:
        return Unmet("min_version", f"{serves} is served, and min_version is sequence {oldest}")
    lag = _lag(serves, committed)
    if demands.max_lag is not None and (lag is None or lag > demands.max_lag):
        return Unmet("max_lag", f"{serves} is served, {committed} is committed, and max_lag is {demands.max_lag}")
    return None


def at_delivery(demands: Demands, spans: Sequence[VersionSpan], committed: Point) -> Unmet | None:
    """The demand that these tokens of one choice do not meet when they are delivered."""
    if demands.one_version and len(spans) > 1:
        one, other = (point_of_span(span) or UNKNOWN for span in spans[:2])
        return Unmet("one_version", f"tokens from {spans[1].start} on were made by {other}, those before by {one}")
    for span in spans:
        point, unmet = point_of_span(span), None
        if point is not None:
            unmet = at_admission(demands, point, committed)
        elif demands.of_versions:
            unmet = Unmet(demands.named()[0], "the weights that made them are unknown")
        if unmet is not None:
            return Unmet(unmet.demand, f"tokens from {span.start} on: {unmet.message}")
    return None


def oldest_lag(spans: Sequence[VersionSpan], committed: Point) -> int | None:
    """The number of versions by which the oldest of these tokens is behind the committed one. None: there are no tokens
    of the committed run whose version is known."""
    lags = [_lag(point, committed) for span in spans if (point := point_of_span(span)) is not None]
    return max((lag for lag in lags if lag is not None), default=None)


def _lag(one: Point, committed: Point) -> int | None:
    """The difference in sequences. None: the versions are of different runs."""
    return committed.sequence - one.sequence if one.run == committed.run else None
