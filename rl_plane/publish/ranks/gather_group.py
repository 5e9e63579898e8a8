"""Gathers the parts of a tensor at its owner, in torch groups of the publisher's own.

A rank that dies or hangs ends a gather with an error. Then the operations that were posted can't be taken back, so the
next version gets new groups. The trainer's own groups are not touched.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rl_plane._util.own_address import own_address
from rl_plane.errors import Unavailable
from rl_plane.publish.ranks.link import LOOK_S, RESTART
from rl_plane.transports.torch_calls import first_line, gloo_options, has_ended

if TYPE_CHECKING:
    import torch

MARGIN_S = 10.0
"""Seconds beyond the publisher's bound, so that its own error, which names the rank, comes first."""

SLICE_BYTES = 1 << 24
MIN_SLICE_BYTES = 1 << 18
"""Gloo gathers into memory of its own, and copies from there. So the parts come in slices, of SLICE_BYTES for all ranks
together. Each takes a round trip, so a rank's slice has at least MIN_SLICE_BYTES."""

Check = Callable[[float, str], None]
"""`(since, what)`: raises if a rank has died, or if this rank has waited since `since` (monotonic) for too long."""
Step = Callable[[], None]
"""Counts a step of this rank, by which the other ranks see how far it has come."""


class GatherGroup:
    """The ranks of a trainer, as the publisher gathers among them: one torch group for each kind of device."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        name: str,
        address: tuple[str, int],
        *,
        bound_s: float,
        check: Check,
        step: Step,
    ) -> None:
        """Makes the group. Torch's groups form with the first gather.

        Args:
            rank: this rank.
            ranks: the number of ranks.
            name: the group's name, which is used once.
            address: rank 0's address, which tells by which network the ranks reach each other.
            bound_s: how long a gather may take, in seconds.
            check: called every LOOK_S.
            step: called before each gather.
        """
        self.rank = rank
        self.name = name
        self.broken = False
        """A gather has failed, so the ranks may be out of step."""
        self._ranks = ranks
        self._address = address
        self._timeout = timedelta(seconds=bound_s + MARGIN_S)
        self.check = check
        """Called every LOOK_S while this rank waits for the others."""
        self._step = step
        self._groups: dict[str, Any] = {}

    def gather(self, part: torch.Tensor, slot_bytes: int, owner: int) -> torch.Tensor | None:
        """Brings each rank's part to the owner. Collective.

        Args:
            part: bytes, at most `slot_bytes`.
            slot_bytes: the length of the longest part, the same on every rank.
            owner: the rank that gets the parts.

        Returns:
            On the owner the parts one after another, each `slot_bytes` long; None on other ranks.
        """
        import torch
        import torch.distributed as dist

        self._step()
        group = self._group(part.device.type)
        if part.numel() < slot_bytes:
            padded = torch.empty(slot_bytes, dtype=torch.uint8, device=part.device)
            padded[: part.numel()] = part
            part = padded
        options = dist.GatherOptions()
        options.rootRank = owner
        options.timeout = self._timeout
        whole = None
        if self.rank == owner:
            whole = torch.empty(self._ranks * slot_bytes, dtype=torch.uint8, device=part.device)
        if not slot_bytes:
            return whole
        slots = [] if whole is None else list(whole.split(slot_bytes))
        step = max(MIN_SLICE_BYTES, SLICE_BYTES // self._ranks) if part.device.type == "cpu" else slot_bytes
        since = time.monotonic()
        try:
            for start in range(0, slot_bytes, step):
                outputs = [[slot[start : start + step] for slot in slots]] if slots else []
                work = group.gather(outputs, [part[start : start + step].contiguous()], options)
                while not has_ended(work, on_gpu=part.device.type != "cpu"):
                    self.check(since, "a gather")
                work.wait()
        except RuntimeError as error:
            self.broken = True
            self._explain(since)
            raise Unavailable(
                f"a gather among the trainer's ranks broke: {first_line(error)}", fix=RESTART
            ) from error
        except BaseException:
            self.broken = True
            raise
        return whole

    def _explain(self, since: float) -> None:
        """Waits a moment for the link to name the rank that has died: torch may notice it first."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            self.check(since, "a gather")
            time.sleep(LOOK_S)

    def _group(self, device: str) -> Any:
        if device not in self._groups:
            self._groups[device] = self._formed(device)
        return self._groups[device]

    def _formed(self, device: str) -> Any:
        """Forms torch's group, on a thread of its own since torch waits there for every rank."""
        ended = threading.Event()
        made: list[Any] = []
        errors: list[Exception] = []

        def form() -> None:
            try:
                made.append(self._make(device))
            except Exception as error:
                errors.append(error)
            ended.set()

        threading.Thread(target=form, name="rl-plane-gather", daemon=True).start()
        since = time.monotonic()
        try:
            while not ended.wait(LOOK_S):
                self.check(since, "the forming of the ranks' group")
        except BaseException:
            self.broken = True
            raise
        if errors:
            self.broken = True
            self._explain(since)
            raise Unavailable(
                f"the trainer's ranks can't form a group: {first_line(errors[0])}", fix=RESTART
            ) from errors[0]
        return made[0]

    def _make(self, device: str) -> Any:
        import torch.distributed as dist

        store = dist.PrefixStore(f"{self.name}/{device}", default_store())
        if device != "cpu":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, self.rank, self._ranks, options)
        host = self._address[0] if self.rank == 0 else own_address(*self._address)
        return dist.ProcessGroupGloo(store, self.rank, self._ranks, gloo_options(host, self._timeout))

    def drop(self) -> None:
        """Releases torch's groups on a thread: gloo waits until what was posted has ended, or timed out."""
        groups, self._groups = list(self._groups.values()), {}
        if not groups:
            return

        def bury() -> None:
            while groups:
                with contextlib.suppress(RuntimeError):
                    groups.pop().abort()

        threading.Thread(target=bury, name="rl-plane-gather", daemon=True).start()


def default_store() -> Any:
    """The store by which the trainer's ranks have found each other."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
