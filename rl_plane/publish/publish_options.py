"""The options of a WeightPublisher that hold for every version, checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.fleet_ops import DEFAULT_WAIT_S
from rl_plane.protocol.update_requests import UpdateWeights
from rl_plane.protocol.validation import parse_body
from rl_plane.protocol.versions import DEFAULT_ALGORITHM, DigestAlgorithm
from rl_plane.sync import call_bound_s
from rl_plane.transports.registry import AUTO
from rl_plane.weights.delta_codec import import_numba

Encoding = Literal["auto", "full", "delta", "partial"]


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """Limits of a publisher's waits and retries; beyond them it raises."""

    drain_s: float = 600.0
    """Seconds that `close` and the next `publish` wait for the version under way, beside the update's own time-outs: a
    large model over a slow network."""
    others_s: float = 30.0
    """Seconds to wait while another trainer's update is prepared or under way, or while no answer comes to an op of an
    update, as when the frontend restarts."""
    again_s: float = 1.0
    """Seconds between two calls of an op whose answer was lost, or that another trainer's update has refused."""
    openings: int = 8
    """The number of times that an update is opened while workers join, as in a fleet that starts. Each takes about a
    second, in which the other ranks may wait."""
    ranks_s: float = 300.0
    """Seconds that a rank of the trainer may take to come to a publication, or for one of its steps: the gathering of a
    tensor, or the sending of a bucket."""
    silent_s: float = 60.0
    """Seconds after which a rank hangs that has not sent a beat, which a thread of its own sends each second."""


PUBLISH_LIMITS = PublishLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """The options of one publisher. `WeightPublisher.__init__` documents each; `transport_options` is its `options`.

    Raises InvalidRequest for a wrong option.
    """

    transport: str = AUTO
    root: Path | None = None
    transport_options: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    cast: bool = False
    encoding: Encoding = "auto"
    trainable_only: bool = False
    with_base: bool = False
    """The publisher has the checkpoint that the fleet serves."""
    digest: DigestAlgorithm = DEFAULT_ALGORITHM
    bucket_bytes: int | None = None
    workers: int = 1
    wait_s: float = DEFAULT_WAIT_S
    trainer_stays: bool = True
    limits: PublishLimits = PUBLISH_LIMITS

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise InvalidRequest(
                f"bucket_bytes is {self.bucket_bytes}", field="bucket_bytes", fix="give at least 1"
            )
        if self.digest not in get_args(DigestAlgorithm):
            raise InvalidRequest(f"digest is {str(self.digest)[:64]!r}", field="digest", fix="use xxh3, or blake3")
        if self.encoding not in get_args(Encoding):
            raise InvalidRequest(
                f"encoding is {str(self.encoding)[:64]!r}",
                field="encoding",
                fix="use auto, full, delta, or partial",
            )
        field = "trainable_only" if self.trainable_only else "base" if self.with_base else "encoding"
        if field != "encoding" and self.encoding not in ("auto", "partial"):
            raise InvalidRequest(
                f"encoding {self.encoding} and {field} exclude one another, because {field} sends whole tensors",
                field=field,
                fix="leave one of the two out",
            )
        encoding = self.mode
        if encoding not in ("delta", "partial"):
            return
        if self._only_full:
            raise InvalidRequest(
                f"encoding {encoding} needs staged copies: it excludes cast, staging none and keep_staged false",
                field=field,
                fix=f"leave {field} out, or leave those out",
            )
        if self.adapter is not None:
            raise InvalidRequest("an adapter is always sent in full", field=field, fix=f"leave {field} out")
        if encoding == "delta":
            import_numba()

    @property
    def _only_full(self) -> bool:
        return self.cast or self.policy.get("staging") == "none" or self.policy.get("keep_staged") is False

    @property
    def mode(self) -> Encoding:
        """`encoding`, with `auto` resolved: to `partial` with `trainable_only` or a base, and to `full` where a delta
        can never be sent."""
        if self.trainable_only or self.with_base:
            return "partial"
        if self.encoding == "auto" and (self._only_full or self.adapter is not None or not self.trainer_stays):
            return "full"
        return self.encoding

    def body(self, version: str | None) -> dict[str, Any]:
        """The body of an update, without its `transport`. Raises InvalidRequest for a wrong field."""
        body: dict[str, Any] = {"cast": self.cast, "policy": self.policy, "digest_algorithm": self.digest}
        if version is not None:
            body["version"] = version
        if self.adapter is not None:
            body["target"] = {"kind": "lora", "op": "load", "name": self.adapter}
        parse_body(UpdateWeights, {**body, "transport": {"backend": "any"}})
        return body

    def bound_s(self) -> float:
        """The longest time in seconds that one version may take."""
        return self.limits.drain_s + call_bound_s("update_weights", {"policy": self.policy})


def absolute_root(root: Path | str | None) -> Path | None:
    """The directory that trainer and workers share, as an absolute path with `~` expanded."""
    return None if root is None else Path(os.path.abspath(os.path.expanduser(root)))
