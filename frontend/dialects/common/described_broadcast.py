"""prime-rl's own NCCL broadcast: one call is the whole update, and the trainer says in the group what comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from frontend.dialects.common.await_trainer import await_trainer
from frontend.dialects.common.fleet_as_one import NOT_BEGUN
from frontend.dialects.common.transaction import Transactions
from rl_plane.errors import PlaneError
from rl_plane.protocol.trainer_groups import PRIME_RL_FORMAT
from rl_plane.protocol.vllm_bodies import Transfer

TRAINER_S = 1200.0
"""The longest wait in seconds for a trainer that is still loading its model: prime-rl's own default time-out."""


@dataclass
class _Last:
    """The newest committed broadcast."""

    transfer: Transfer | None = None
    weight_dir: str | None = None
    reply: dict[str, Any] = field(default_factory=dict)


class DescribedBroadcast:
    """The broadcasts of one trainer to the whole fleet."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._last = _Last()

    @property
    def formed(self) -> bool:
        """Reports whether the trainer's group is of this kind. Then the directories that its client names have no
        weights."""
        transfer = self._transactions.transfer
        return transfer is not None and transfer.format is not None

    async def init(self, info: Mapping[str, Any], where: str) -> None:
        """Waits for the trainer, and forms the group."""

        async def ready() -> None:
            timeout_s = min(info["timeout_s"] or TRAINER_S, TRAINER_S)
            await await_trainer(info["master_address"], info["master_port"], timeout_s)

        await self._transactions.init(info, where, format=PRIME_RL_FORMAT, ready=ready)

    async def update(self, weight_dir: str | None, label: str | None, request_id: str) -> dict[str, Any]:
        """Receives and commits what the trainer broadcasts. A failed update ends the group, so it is forgotten.

        The client names a directory for each step. A call with the same name is the same call, whose answer was lost:
        the trainer does not send twice."""
        transactions, last = self._transactions, self._last
        transfer = transactions.transfer
        if weight_dir and transfer is last.transfer and weight_dir == last.weight_dir:
            return last.reply
        started = False
        try:
            await transactions.start(request_id)
            started = True
            reply = await transactions.finish(label)
        except PlaneError as error:
            if started or not isinstance(error, NOT_BEGUN):
                transactions.transfer = None
                await transactions.drop()
            raise
        self._last = _Last(transfer, weight_dir, reply)
        return reply
