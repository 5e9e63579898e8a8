"""Measures how long a trainer's `publish` takes into one `hf` worker, by what moves weights from memory to memory,
beside a copy of as many bytes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench.memory import DELTA, some_places, trained
from bench.peers import copied_unhashed, hf_worker, unhashed
from bench.stored import UNVERIFIED
from rl_plane.publish import WeightPublisher
from rl_plane.publish.publish_options import Encoding
from rl_plane.transports import packing


@dataclass(slots=True)
class PublishedTimes:
    """Seconds, a number for each round."""

    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Backend, with DELTA, UNVERIFIED or neither → of `publish`, from its call to the version that is served."""
    copies: dict[str, list[float]] = field(default_factory=dict)
    """Kind of publication → seconds of a copy just before it."""


async def measure_published(model: Path, backends: Sequence[str], rounds: int) -> PublishedTimes:
    return await asyncio.to_thread(_measure, model, backends, rounds)


def _measure(model: Path, backends: Sequence[str], rounds: int) -> PublishedTimes:
    weights = trained(model)
    times = PublishedTimes(sum(tensor.nbytes for tensor in weights.values()))
    for verify in (True, False):
        _measure_into(times, model, weights, backends, rounds, verify)
    return times


def _measure_into(
    times: PublishedTimes,
    model: Path,
    weights: Mapping[str, Any],
    backends: Sequence[str],
    rounds: int,
    verify: bool,
) -> None:
    """`verify` False: neither the worker nor this trainer hashes a tensor, for which the product has no switch."""
    room = np.ones(times.nbytes, np.uint8), np.ones(times.nbytes, np.uint8)
    namespace = f"published{secrets.token_hex(2)}"
    with ExitStack() as stack:
        if not verify:
            stack.enter_context(mock.patch.object(packing, "tensor_digest", unhashed))
            stack.enter_context(mock.patch.object(packing, "copy_hashed", copied_unhashed))
        url, _ = stack.enter_context(hf_worker(namespace, model, verify=verify))

        def publisher(name: str, encoding: Encoding) -> WeightPublisher:
            made = WeightPublisher(weights, url, namespace=namespace, transport=name, encoding=encoding)
            return stack.enter_context(closing(made))

        def publish(by: WeightPublisher, what: str, number: int) -> None:
            copied = _copy(*room)
            start = time.perf_counter()
            publication = by.publish(f"{what} {number}")
            took = time.perf_counter() - start
            (worker,) = publication.result()["workers"]
            assert worker["swap_s"], "not only its name has changed"
            if number >= 0:
                times.seconds.setdefault(what, []).append(took)
                times.copies.setdefault(what, []).append(copied)

        publishers = {name: publisher(name, "full") for name in backends}
        for number in range(-1, rounds):  # the first one makes buffers and groups
            for name, by in publishers.items():
                for tensor in weights.values():  # a step: what is served already would not be swapped
                    tensor.neg_()
                publish(by, name if verify else name + UNVERIFIED, number)
        if not verify:
            return  # deltas find what they change by its digest
        places = some_places(weights)
        for (
            name
        ) in backends:  # one after another: after the version of another publisher, all of a version is sent
            by = publisher(name, "delta")
            for number in range(-1, rounds):
                for flat, where in places:
                    flat[where] ^= 1
                publish(by, name + DELTA, number)


def _copy(source: np.ndarray, target: np.ndarray) -> float:
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start
