"""The numeric canary: a few fixed token sequences that every worker scores after it has swapped in new weights.

A digest proves which bytes a worker received. The canary proves what the engine computes with them: the log
probability of each token of the sequences, given the tokens before it. This module defines the canary as an update
requests it (`Canary`), as the decision record carries it (`CanaryRecord`), and the values that earlier versions had
(`CanaryHistory`). `rl_plane.commit.canary_rules` decides which workers pass. Neither module does I/O.

A *vector* holds the log probabilities of one sequence, in nats: one for each token but the first. *Vectors* hold one
vector for each sequence. An *engine kind* (`engine_kind`) names engines whose vectors must agree closely.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from typing_extensions import TypedDict  # pydantic describes no other TypedDict before Python 3.12

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.stored import Stored
from rl_plane.protocol.validation import Body, invalid_from_pydantic

CANARY_NAME = "canary.json"
"""The version's numeric canary, beside a checkpoint: see `Canary`. No digest covers it."""
MAX_CANARY_BYTES = 100_000
"""The largest canary has 2,048 token ids and 2,040 log probabilities of some 20 characters."""

MAX_SEQUENCES = 8
MAX_SEQUENCE_TOKENS = 256
"""Eight sequences of 256 tokens are one prefill of 2,048 tokens, which every engine computes in one forward."""
MAX_TOKEN_ID = (1 << 31) - 1
"""Engines keep token ids in 32 bits."""

DEFAULT_SEQUENCES = 4
DEFAULT_SEQUENCE_TOKENS = 32
"""128 tokens reach every layer, and nearly every expert of a mixture. On a GPU, where a small forward waits for memory,
they cost about as much as one token of decoding; on one core of a CPU about 14 times that (docs/benchmarks.md)."""

LOGPROB_EPSILON = 1e-3
"""The largest value above zero that rounding may give to a log probability."""
MIN_LOGPROB = -1e4
"""No working model makes a token less likely. The bound keeps each value short on the wire."""
DECIMALS = 6
"""The digits of a stored log probability. A thousandth of the tightest tolerance is still exact."""

WITHIN_KIND_FLOAT32 = 0.01
"""The largest difference between two engines of one kind in float32. They run the same kernels on the same batch, so
only the order of atomic additions can differ, by some 1e-5."""
WITHIN_KIND_HALF = 0.02
"""The largest difference between two engines of one kind in bfloat16 or float16. A faulty reload of fused experts
measured 0.022 in bfloat16; two correct engines measured below 0.005."""
ACROSS_KINDS = 0.05
"""The largest difference between engines of different kinds, and between an engine and the trainer's own model.
Other kernels round elsewhere. A faulty reload of fused experts measured 0.059."""
ROUNDING_WITHIN_KIND = 1 / 160
"""The share of the expected log probability that two half-precision engines may differ by, where that is more than the
bound above: a bfloat16 logit has 8 bits, and an unlikely token has large logits. At -32 nats the same model in bfloat16
and in float32 measured 0.21 apart."""
ROUNDING_ACROSS_KINDS = 1 / 80
"""The share for two engines of different kinds: each of them rounds in its own way."""
MAX_TOLERANCE = 10.0
"""A larger tolerance would accept any weights, so it is a typing error."""

MAX_KINDS = 4
"""Engine kinds whose vectors a record stores. A worker of a further kind is compared with these."""
MAX_KIND_CHARS = 120
MAX_RECORD_BYTES = 200_000
"""The encoded size of the largest CanaryRecord: 2,048 token ids and five times 2,040 log probabilities. The largest
message of the plane has 1,000,000 bytes. The default canary of one engine kind has about 2,000."""

MAX_VERSIONS = 64
"""Versions that a CanaryHistory remembers: a roll-back rarely reaches further."""
MAX_HISTORY_BYTES = 512_000
"""The encoded size of a CanaryHistory, half of what a NATS message carries. Older versions go first."""

Vectors = tuple[tuple[float, ...], ...]
Sequences = tuple[tuple[int, ...], ...]
OnCanaryFailure = Literal["rollback", "exclude", "warn"]
CanaryOrigin = Literal["update", "canary.json", "default"]
"""The origin of an update's sequences: its request, the file beside its checkpoint, or the vocabulary."""
CanaryAction = Literal["open", "rollback", "exclude"]
CanaryReason = Literal["trainer", "reference", "fleet", "tie", "unusable"]
CanaryReference = Literal["trainer", "reference", "fleet", "nothing"]
"""The other side of a comparison: the trainer's values, the values that this version had before, or the other workers'
values. `nothing`: the worker has nothing to be compared with, or its own vectors are unusable."""

TokenId = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKEN_ID)]
Logprob = Annotated[float, Field(strict=True, ge=MIN_LOGPROB, le=LOGPROB_EPSILON)]


class Canary(Body):
    """Token sequences that every worker scores after an update, and what the trainer's own model gives for them."""

    sequences: list[Annotated[list[TokenId], Field(min_length=2, max_length=MAX_SEQUENCE_TOKENS)]] = Field(
        min_length=1, max_length=MAX_SEQUENCES
    )
    """1 to 8 sequences of 2 to 256 token ids."""
    expected: list[list[Logprob]] | None = None
    """For each sequence the log probability of each token but the first, in nats, in the trainer's own model. Without
    them the workers are compared with each other, and with the values that this version had before."""
    tolerance: float | None = Field(None, strict=True, gt=0, le=MAX_TOLERANCE)
    """The largest absolute difference of a log probability from `expected`, and between engine kinds. Without it: 0.05,
    or 1/80 of the expected log probability if that is more. Engines of one kind are compared more tightly."""

    @model_validator(mode="after")
    def _one_for_each_token(self) -> Self:
        if self.expected is None:
            return self
        if len(self.expected) != len(self.sequences):
            raise InvalidRequest(
                f"there are {len(self.sequences)} sequences and {len(self.expected)} lists of expected values",
                field="expected",
                fix="give one list for each sequence",
            )
        for number, (tokens, values) in enumerate(zip(self.sequences, self.expected, strict=True)):
            if len(values) != len(tokens) - 1:
                raise InvalidRequest(
                    f"sequence {number} has {len(tokens)} tokens and {len(values)} expected values",
                    field=f"expected.{number}",
                    fix=f"give {len(tokens) - 1} values: one for each token but the first",
                )
        return self


class CanarySummary(TypedDict):
    """The result of the canary for all workers of one update, as replies and the history show it."""

    action: CanaryAction
    """`open`: the fleet serves the version, without the workers that failed. `rollback`: the fleet returns to the
    version before. `exclude`: the version stays committed, and no worker serves it."""
    scored: int
    """The number of workers that scored the version."""
    failed: int
    origin: CanaryOrigin
    """The origin of the sequences: the request, the file beside the checkpoint, or the vocabulary."""
    reasons: NotRequired[dict[CanaryReason, int]]
    """Reason → the number of workers that failed for it. Absent: no worker failed."""
    against: NotRequired[CanaryReference]
    """The other side of the worst comparison. This key and the next three are absent if no worker was compared."""
    difference: NotRequired[float | None]
    """The largest absolute difference of a log probability, in nats."""
    mismatch_kl: NotRequired[float | None]
    """The mean of exp(d) - 1 - d over all tokens, where d is the expected minus the measured log probability."""
    tolerance: NotRequired[float | None]
    """The largest difference that is allowed there."""
    warning: NotRequired[str]
    """Why the fleet serves the version although every worker failed, or why it can't return to the version before."""


def parse_canary(value: Any, field: str) -> Canary:
    """The checked canary in `value`. InvalidRequest names the wrong part beneath `field`."""
    try:
        return Canary.model_validate(value)
    except ValidationError as error:
        raise invalid_from_pydantic(error, field) from error
    except InvalidRequest as error:
        raise InvalidRequest(
            error.message, **{**error.facts, "field": f"{field}.{error.facts['field']}"}
        ) from error


def _canary_of_policy(value: Any) -> Any:
    if value is None or value == "off" or isinstance(value, Canary):
        return value
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"the canary is {str(value)[:64]!r}",
            field="policy.canary",
            fix='give {"sequences": [[1, 2, 3]]}, or "off", or leave it out',
        )
    return parse_canary(value, "policy.canary")


PolicyCanary = Annotated[Canary | Literal["off"] | None, BeforeValidator(_canary_of_policy)]
"""The type of `policy.canary`."""


def default_canary(vocab_size: int) -> Canary:
    """The canary of an update that gives none: the same on every machine for one vocabulary.

    The ids come from the middle of the vocabulary, because tokenizers put special tokens at its ends, and an engine may
    refuse an image's placeholder without an image."""
    low = vocab_size // 16
    width = max(1, vocab_size * 3 // 4 - low)
    count = DEFAULT_SEQUENCES * DEFAULT_SEQUENCE_TOKENS
    # A hash, because the standard library does not promise the numbers of `random` for later versions of Python.
    stream = hashlib.shake_128(b"rl_plane canary 1").digest(8 * count)
    ids = [low + int.from_bytes(stream[8 * place : 8 * place + 8], "big") % width for place in range(count)]
    starts = range(0, count, DEFAULT_SEQUENCE_TOKENS)
    return Canary(sequences=[ids[start : start + DEFAULT_SEQUENCE_TOKENS] for start in starts])


def shortened(canary: Canary, max_model_len: int) -> Canary:
    """The canary for a model whose context is shorter than its sequences."""
    return Canary(sequences=[tokens[: max(2, max_model_len - 1)] for tokens in canary.sequences])


def check_vocabulary(
    canary: Canary, vocab_size: int, max_model_len: int | None = None, field: str = "policy.canary"
) -> None:
    """InvalidRequest unless a model can score the sequences. `max_model_len` counts prompt and new tokens together, and
    an engine makes one token to score a prompt."""
    for number, tokens in enumerate(canary.sequences):
        for place, token in enumerate(tokens):
            if token >= vocab_size:
                raise InvalidRequest(
                    f"token {token} is outside the model's vocabulary of {vocab_size}",
                    field=f"{field}.sequences.{number}.{place}",
                    fix=f"use ids from 0 to {vocab_size - 1}",
                )
        if max_model_len is not None and len(tokens) >= max_model_len:
            raise InvalidRequest(
                f"sequence {number} has {len(tokens)} tokens, and the engine takes {max_model_len} with the next one",
                field=f"{field}.sequences.{number}",
                fix=f"use at most {max_model_len - 1} tokens",
            )


def engine_kind(engine: str, engine_version: str, dtype: str, device: str, tp_size: int) -> str:
    """The name of an engine kind: engines that run the same kernels over the same parts of each tensor.

    Pipeline parallelism is not part of it, because it changes no sum."""
    parts = (f"{engine}-{engine_version}", dtype.removeprefix("torch."), device.partition(":")[0], f"tp{tp_size}")
    return "/".join(part.replace("/", "-") for part in parts)[:MAX_KIND_CHARS]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest difference between two log probabilities that count as equal."""

    absolute: float
    """In nats."""
    relative: float = 0.0
    """The share of the expected log probability: half-precision logits round by a share of their size."""

    def at(self, expected: float) -> float:
        """The tolerance for a token with this expected log probability, in nats."""
        return max(self.absolute, self.relative * abs(expected))


def _is_float32(kind: str) -> bool:
    return "/float32/" in kind


def sequences_id(sequences: Sequence[Sequence[int]]) -> str:
    """A short name of the sequences: vectors are comparable only where it is the same."""
    text = json.dumps([list(tokens) for tokens in sequences], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class CanaryRecord(Stored):
    """The canary of a committed version, in its decision record: a worker that swaps this version in judges its own
    vectors by it (`rl_plane.commit.canary_rules.evaluate_worker`). Its encoded size is at most MAX_RECORD_BYTES."""

    sequences: Sequences
    expected: Vectors | None = None
    """The trainer's values. None: the update gave none, or the fleet serves the version in spite of them (`warn`)."""
    references: Mapping[str, Vectors] = field(default_factory=dict)
    """Engine kind → the vectors that engines of this kind gave for this version, of at most MAX_KINDS kinds. Before the
    first workers have scored the version they come from the history."""
    tolerance: float | None = None
    """The update's tolerance for `expected` and across kinds. None: ACROSS_KINDS and ROUNDING_ACROSS_KINDS."""
    undecided: bool = False
    """The workers' values differed, and nothing showed which ones are right. No worker passes then."""
    overruled: str = ""
    """Why every worker failed a version that is served all the same (`warn`): its `references` are the values that
    failed. Empty: no failure was overruled."""
    origin: CanaryOrigin = "default"

    @classmethod
    def begun(
        cls, canary: Canary, history: CanaryHistory, digest: str, origin: CanaryOrigin = "default"
    ) -> CanaryRecord:
        """The record at the time of the decision, before any worker has scored the version `digest`."""
        sequences = tuple(tuple(tokens) for tokens in canary.sequences)
        expected = rounded(canary.expected) if canary.expected is not None else None
        return cls(sequences, expected, history.values(digest, sequences), canary.tolerance, origin=origin)

    def across(self, kinds: Iterable[str]) -> Tolerance:
        """The tolerance between engines of these kinds, and between them and the trainer's values."""
        if self.tolerance is not None:
            return Tolerance(self.tolerance)
        return Tolerance(ACROSS_KINDS, 0.0 if all(map(_is_float32, kinds)) else ROUNDING_ACROSS_KINDS)

    def within(self, kind: str) -> Tolerance:
        """The tolerance between engines of this kind."""
        bound = self.tolerance if self.tolerance is not None else ACROSS_KINDS
        if _is_float32(kind):
            return Tolerance(min(bound, WITHIN_KIND_FLOAT32))
        return Tolerance(min(bound, WITHIN_KIND_HALF), ROUNDING_WITHIN_KIND)


@dataclass(frozen=True, slots=True)
class PastValues(Stored):
    """The vectors of one version for one set of sequences."""

    digest: str
    """The digest of the version's base weights."""
    sequences: str
    """The `sequences_id`."""
    values: Mapping[str, Vectors]
    """Engine kind → vectors, of at most MAX_KINDS kinds."""


@dataclass(frozen=True, slots=True)
class CanaryHistory(Stored):
    """The vectors of the newest versions that the fleet has served, by digest.

    A version that returns (a roll-back, a restart, a worker that heals) must give the same values again. The history is
    one key in the state bucket (`rl_plane.protocol.subjects.CANARY_HISTORY`); its encoded size is at most
    MAX_HISTORY_BYTES."""

    versions: tuple[PastValues, ...] = ()
    """At most MAX_VERSIONS, the newest last."""

    def values(self, digest: str, sequences: Sequence[Sequence[int]]) -> Mapping[str, Vectors]:
        """Engine kind → the vectors that this version had. Empty if it was not served with these sequences."""
        wanted = (digest, sequences_id(sequences))
        for past in self.versions:
            if (past.digest, past.sequences) == wanted:
                return past.values
        return {}

    def with_values(
        self, digest: str, sequences: Sequence[Sequence[int]], values: Mapping[str, Vectors]
    ) -> CanaryHistory:
        """The history after the fleet has opened on this version. The first values of a kind stay, so that a slow drift
        over many returns adds up to a difference."""
        if not values:
            return self
        merged = first_kinds({**values, **self.values(digest, sequences)})
        newest = PastValues(digest, sequences_id(sequences), merged)
        others = [past for past in self.versions if (past.digest, past.sequences) != (digest, newest.sequences)]
        return CanaryHistory((*others, newest)[-MAX_VERSIONS:])

    def encode(self) -> bytes:
        """JSON for the state bucket. The oldest versions are left out where all of them would be too large."""
        encoded: list[bytes] = []
        left = MAX_HISTORY_BYTES - len(b'{"versions":[]}')
        for past in reversed(self.versions):
            data = json.dumps(past.to_wire(), separators=(",", ":")).encode()
            left -= len(data) + 1
            if left < 0:
                break
            encoded.append(data)
        return b'{"versions":[' + b",".join(reversed(encoded)) + b"]}"


def first_kinds(values: Mapping[str, Vectors]) -> dict[str, Vectors]:
    """Returns the vectors of the first MAX_KINDS kinds, in the order of their names."""
    return {kind: values[kind] for kind in sorted(values)[:MAX_KINDS]}


def rounded(vectors: Sequence[Sequence[float]]) -> Vectors:
    """The vectors as they are stored: DECIMALS digits after the point."""
    return tuple(tuple(round(float(value), DECIMALS) for value in vector) for vector in vectors)
