"""Lets the ranks of one trainer find each other, and tells what they must agree on."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from hashlib import blake2b
from typing import Any

from rl_plane._util.own_address import own_address
from rl_plane.errors import DeadlineExceeded, InvalidRequest
from rl_plane.publish.ranks.gather_group import default_store
from rl_plane.publish.ranks.link import REACHABLE
from rl_plane.publish.sources.base import Taken

_numbers = itertools.count()
"""Every rank makes its publishers in the same order."""


def is_rank_of_torch(rank: int) -> bool:
    """True if torch.distributed runs with several ranks, and knows this one by the same number. Ranks that do not
    can't find each other."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return bool(torch.distributed.get_world_size() > 1 and torch.distributed.get_rank() == rank)


class MeetingPoint:
    """The place in the store of torch.distributed at which rank 0 writes its address."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options`: those of the transport. `host` is this rank's address."""
        import torch.distributed as dist

        self.rank = int(dist.get_rank())
        self.ranks = int(dist.get_world_size())
        self.name = f"rl_plane/publisher{next(_numbers)}"
        self._options = options

    def host(self) -> str:
        """This rank's address, as the other ranks reach it: the option `host`, or the one towards MASTER_ADDR."""
        given = self._options.get("host")
        if isinstance(given, str):
            return given
        master = os.environ.get("MASTER_ADDR")
        if master is None:
            return "127.0.0.1"
        try:
            return own_address(master, int(os.environ.get("MASTER_PORT", "1")))
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"this rank has no address towards MASTER_ADDR {master!r}: {error}",
                field="MASTER_ADDR",
                fix=REACHABLE,
            ) from error

    def announce(self, address: tuple[str, int], secret: str) -> None:
        """Writes rank 0's address."""
        default_store().set(self.name, json.dumps([*address, secret]))

    def find(self, bound_s: float) -> tuple[tuple[str, int], str]:
        """Waits for rank 0's address. Returns it with the secret."""
        store = default_store()
        try:
            store.wait([self.name], timedelta(seconds=bound_s))
            host, port, secret = json.loads(store.get(self.name))
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"rank 0 of the trainer has not come to publish within {bound_s:g} s",
                fix="make a publisher and call publish on every rank, at the same point",
            ) from error
        return (host, port), secret


def agreed_specs(taken: Taken, algorithm: str) -> str:
    """A hash of what all ranks must agree on: names, dtypes, shapes and order of the tensors, how they lie, and the
    algorithm of their digests."""
    specs = [[name, spec.dtype, list(spec.shape), name in taken.shared] for name, spec in taken.specs]
    return blake2b(json.dumps([algorithm, specs]).encode(), digest_size=16).hexdigest()
