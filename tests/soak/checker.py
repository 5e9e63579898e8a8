"""Is what came right? Pure: from the tokens, what they were said to be, and what was committed, to faults.

Under each weights of the soak one token follows each token, and another one under other weights. So a token that is
lost, comes twice or belongs to another version than its label says breaks the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FEW = 8
"""Tokens that one lost message had, at most times."""
Version = tuple[str, int]
"""(run, sequence): of a base or of an adapter, which count together."""
Weights = tuple[str, str]
"""(label, digest)."""
Floor = Mapping[str | None, int]
"""The adapter's name, or None for the base → the newest sequence that was served when the request began."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A violation, and where it happened."""

    kind: str
    request: str
    worker: str
    span: str
    words: str

    def __str__(self) -> str:
        where = ", ".join(
            f"{name} {value}"
            for name, value in (("request", self.request), ("worker", self.worker), ("span", self.span))
            if value
        )
        return f"{self.kind}: {self.words} ({where})" if where else f"{self.kind}: {self.words}"


@dataclass(frozen=True, slots=True)
class Delivered:
    """One choice as its client received it."""

    request: str
    worker: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    spans: Sequence[Mapping[str, Any]] | None
    """None: the connection ended, or the client left, before they came."""
    max_tokens: int
    finish_reason: str | None
    """None: the stream was cut off."""
    floor: Floor
    adapter: str | None = None
    logprobs: int | None = None
    """The number of logprobs that came; None: none were requested."""
    one_version: bool = False
    """True if the request demanded a single version."""
    max_lag: int | None = None
    """The request's `max_lag`; None: no limit."""
    committed: int = 0
    """The newest sequence that is known to have been committed when all of it was delivered."""
    may_abort: bool = False
    """True if the choice may be short: its client left, or a step ended such choices early."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Maps a digest to the token that follows each token."""

    bases: Mapping[str, Sequence[int]]
    adapters: Mapping[str, Sequence[int]]

    def following(self, span: Mapping[str, Any]) -> Sequence[int] | None:
        """Returns the token after each token under the weights of the span. None: no trainer has made such weights."""
        if (adapter := span.get("adapter")) is not None:
            return self.adapters.get(adapter["digest"]) if span["digest"] in self.bases else None
        return self.bases.get(span["digest"])


@dataclass(slots=True)
class Checker:
    """Checks deliveries as they come. `settle` checks what only the history can decide."""

    reference: Reference
    tokens: int = 0
    choices: int = 0
    crossed: int = 0
    """Choices of more than one version."""
    fragments: int = 0
    """Choices without labels, of which only the tokens can be checked."""
    _seen: dict[Version, dict[tuple[str | None, Weights], Delivered]] = field(default_factory=dict)
    _cut: list[Delivered] = field(default_factory=list)

    def take(self, got: Delivered) -> list[Fault]:
        self.choices += 1
        self.tokens += len(got.tokens)
        if got.spans is None:
            self.fragments += 1
            if got.tokens:
                self._cut.append(got)
            if got.finish_reason is not None:
                return [
                    _fault("unlabelled", got, None, f"{len(got.tokens)} tokens came to their end without labels")
                ]
            return []
        faults = [*_check_end(got), *self._check_spans(got)]
        self.crossed += len(got.spans) > 1
        if got.one_version and len({_point(span) for span in got.spans}) > 1:
            faults.append(_fault("demand", got, got.spans[1], "it was to be of one version"))
        faults += _check_lag(got)
        for span in got.spans:
            self._note(got, None, span)
            if (adapter := span.get("adapter")) is not None:
                self._note(got, got.adapter, {**adapter, "run": span["run"]})
        return faults

    def settle(self, committed: Mapping[tuple[str | None, Version], Weights], final: bool = False) -> list[Fault]:
        """Returns the faults of everything delivered so far. `committed`: (adapter, version) → its weights.
        Unexplained deliveries wait unless `final`, because the history shows an update after its first tokens."""
        faults = []
        for version in list(self._seen):
            seen = self._seen.pop(version)
            for (adapter, weights), got in seen.items():
                due = committed.get((adapter, version))
                if due is None and not final:
                    self._seen.setdefault(version, {})[adapter, weights] = got
                elif due != weights:
                    words = f"labelled {weights} at {version}, where {due or 'nothing'} was committed"
                    faults.append(_fault("mislabelled", got, None, words))
        unexplained = []
        for got in self._cut:
            if wrong := self._check_cut(got, committed):
                unexplained.append(got)
                faults += wrong if final else ()
        self._cut = unexplained
        return faults

    # ---- one choice ----

    def _check_spans(self, got: Delivered) -> list[Fault]:
        at = 0
        before: dict[str | None, int] = dict(got.floor)
        for span in got.spans or ():
            if span["start"] != at or not at < span["end"] <= len(got.tokens):
                return [_fault("mislabelled", got, span, f"spans leave a gap, or overlap, at token {at}")]
            told = {None: span["sequence"]}
            if (adapter := span.get("adapter")) is not None:
                told[adapter["name"]] = adapter["sequence"]
            if (adapter["name"] if adapter is not None else None) != got.adapter:
                return [_fault("mislabelled", got, span, f"it was asked of {got.adapter or 'the base'}")]
            for name, sequence in told.items():
                if sequence < before.get(name, 0):
                    words = f"{name or 'the base'} at {sequence}, after {before[name]} was served"
                    return [_fault("stale", got, span, words)]
                before[name] = sequence
            if (wrong := self._check_chain(got, span)) is not None:
                return [wrong]
            at = span["end"]
        if at != len(got.tokens):
            return [_fault("unlabelled", got, None, f"the spans end at {at}, the tokens at {len(got.tokens)}")]
        return []

    def _check_chain(self, got: Delivered, span: Mapping[str, Any]) -> Fault | None:
        following = self.reference.following(span)
        if following is None:
            return _fault("mislabelled", got, span, "no trainer has made such weights")
        for position in range(span["start"], span["end"]):
            last = got.tokens[position - 1] if position else got.prompt[-1]
            if got.tokens[position] != following[last]:
                return self._explain(got, span, position, last, following)
        return None

    def _explain(
        self, got: Delivered, span: Mapping[str, Any], position: int, last: int, following: Sequence[int]
    ) -> Fault:
        token, due = got.tokens[position], following[last]
        words = f"token {position} is {token}, after {last} comes {due}"
        if token == last:
            return _fault("duplicated", got, span, words)
        chains = [due]
        for _ in got.tokens:
            chains.append(following[chains[-1]])
        skipped = chains.index(token) if token in chains else 0
        every = self.reference.adapters if span.get("adapter") is not None else self.reference.bases
        others = [digest for digest, chain in every.items() if chain[last] == token]
        # Of a gap that is longer than a message, another version is the likelier explanation.
        if skipped and (skipped <= FEW or not others):
            return _fault("lost", got, span, f"{words}; {skipped} before it did not come")
        if others:
            return _fault("mislabelled", got, span, f"{words}; it is of {others[0]}")
        return _fault("wrong", got, span, words)

    def _check_cut(self, got: Delivered, committed: Mapping[tuple[str | None, Version], Weights]) -> list[Fault]:
        """Yields a fault unless versions that were served since the request began explain the tokens, in order."""
        chains = self.reference.adapters if got.adapter is not None else self.reference.bases
        served = sorted(
            (version[1], chains[digest])
            for (name, version), (_, digest) in committed.items()
            if name == got.adapter and digest in chains
        )
        oldest = got.floor.get(got.adapter, 0)
        for position, token in enumerate(got.tokens):
            last = got.tokens[position - 1] if position else got.prompt[-1]
            made_by = [sequence for sequence, chain in served if sequence >= oldest and chain[last] == token]
            if not made_by:
                words = f"token {position} is {token}, which after {last} is of no version from {oldest} on"
                return [_fault("wrong", got, None, words)]
            oldest = made_by[0]
        return []

    def _note(self, got: Delivered, adapter: str | None, told: Mapping[str, Any]) -> None:
        seen = self._seen.setdefault((told["run"], told["sequence"]), {})
        seen.setdefault((adapter, (told["version"], told["digest"])), got)


def _check_end(got: Delivered) -> Iterable[Fault]:
    """A choice has all its tokens, unless it says why not."""
    count = len(got.tokens)
    if count > got.max_tokens:
        yield _fault("duplicated", got, None, f"{count} tokens of {got.max_tokens}")
    elif got.finish_reason == "abort" and not got.may_abort:
        yield _fault("lost", got, None, f"{count} tokens of {got.max_tokens}, and nothing aborted it")
    elif got.finish_reason == "length" and count < got.max_tokens:
        yield _fault("lost", got, None, f"{count} tokens of {got.max_tokens}, and it is said to be complete")
    elif got.finish_reason not in ("length", "abort", None):  # these weights never end a text
        yield _fault("wrong", got, None, f"it ended by {got.finish_reason}")
    if got.logprobs is not None and got.logprobs != count:
        yield _fault("lost", got, None, f"{got.logprobs} logprobs of {count} tokens")


def _check_lag(got: Delivered) -> Iterable[Fault]:
    """Yields a fault if the oldest delivered sequence is further behind the newest committed one than `max_lag`."""
    if got.max_lag is None or not got.spans:
        return
    oldest = min(got.spans, key=sequence_of)
    lag = max(got.committed, *map(sequence_of, got.spans)) - sequence_of(oldest)
    if lag > got.max_lag:
        yield _fault("demand", got, oldest, f"it is {lag} behind, and max_lag is {got.max_lag}")


def sequence_of(span: Mapping[str, Any]) -> int:
    """Returns the newer sequence of the span's base and adapter."""
    return max(_point(span))


def _point(span: Mapping[str, Any]) -> tuple[int, int]:
    adapter = span.get("adapter")
    return span["sequence"], adapter["sequence"] if adapter is not None else 0


def check_partial(got: Delivered, told: Sequence[int]) -> list[Fault]:
    """Returns a fault unless the tokens that an error carries equal the tokens streamed before it."""
    if list(told) == list(got.tokens):
        return []
    kind = "lost" if len(told) > len(got.tokens) else "duplicated"
    return [_fault(kind, got, None, f"{len(got.tokens)} tokens came, and the error tells of {len(told)}")]


def _fault(kind: str, got: Delivered, span: Mapping[str, Any] | None, words: str) -> Fault:
    where = "" if span is None else f"{span['start']}–{span['end']} under {span['version']} ({span['sequence']})"
    return Fault(kind, got.request, got.worker, where, words)
