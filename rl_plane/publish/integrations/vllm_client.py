"""Implements vLLM's `VLLMWeightSyncClient` for a whole fleet over NATS, for vLLM's trainer engine.

    with SyncRlClient.connect() as fleet:
        client = FleetWeightSyncClient(fleet)
        engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=ModuleSource(model))
        engine.send_weights()

vLLM need not be installed here, since its protocol is structural. The engine's `init_info` must be that of a torch
group (`backend` gloo or nccl); see docs/dialects.md.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from rl_plane.errors import Conflict, DeadlineExceeded, InvalidRequest, Locked, PlaneError, Unavailable
from rl_plane.protocol.envelope import engine_replies
from rl_plane.protocol.update_requests import MAX_PART_TIMEOUT_S, PART_TIMEOUT_S, UpdatePolicy, update_arguments
from rl_plane.protocol.vllm_bodies import (
    GROUP,
    InitInfo,
    Transfer,
    UpdateInfo,
    VllmInfo,
    begun_before,
    check_entries,
    check_init,
    init_body,
    one_of_all,
    parse_part,
    parse_update,
    part_body,
    unknown_of,
)
from rl_plane.sync import SyncRlClient
from rl_plane.transports.base import members, world_size

log = logging.getLogger("rl_plane.publish")


class FleetWeightSyncClient:
    """Runs one weight update of vLLM's trainer engine on a fleet. Its methods block, and are called one at a time."""

    def __init__(
        self,
        fleet: SyncRlClient,
        *,
        policy: UpdatePolicy | Mapping[str, Any] | None = None,
        part_timeout_s: float = PART_TIMEOUT_S,
    ) -> None:
        """Makes the client.

        Args:
            fleet: a client of the fleet.
            policy: how each update is carried out: an `UpdatePolicy`, or a mapping of its fields.
            part_timeout_s: the time for one `update_weights` in seconds, at most an hour, if `init_info` has no
                `timeout_s`.
        """
        if not 0 < part_timeout_s <= MAX_PART_TIMEOUT_S:
            raise InvalidRequest(
                f"part_timeout_s is {part_timeout_s!r}",
                field="part_timeout_s",
                fix=f"seconds, above 0 and at most {MAX_PART_TIMEOUT_S:g}",
            )
        self._fleet = fleet
        self._policy_field = update_arguments(policy=policy)
        self._part_timeout_s = part_timeout_s
        self._transfer: Transfer | None = None
        self._update_id: str | None = None
        self._reported: set[str] = set()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Blocks until every rank of the fleet has joined; the trainer joins meanwhile."""
        self._report_unknown("init_info", InitInfo, init_info)
        info = parse_part(InitInfo, init_info, "init_info")
        rows = engine_replies(self._fleet.run("describe", {}))
        check_init(info, rows)
        self._drop()
        self._transfer = None
        transfer = Transfer.of(info, GROUP, self._part_timeout_s)
        self._fleet.run("init_transport", init_body(info, transfer))
        self._transfer = transfer

    def shutdown_weight_transfer_engine(self) -> None:
        """Aborts an unfinished update, and destroys the group."""
        self._drop()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._fleet.run("destroy_transport", {"backend": transfer.backend, "group": transfer.group})

    def start_weight_update(self) -> None:
        """Begins an update: the fleet listens, and continues to generate. Raises Conflict if an update is under way."""
        update_id = uuid.uuid4().hex
        body = {
            "transport": self._formed().transport,
            "cast": True,  # as vLLM does
            **self._policy_field,
        }
        try:
            self._fleet.run("prepare_weights_update", body, request_id=update_id)
        except Locked as error:
            raise begun_before(error, self._update_id) from error
        self._update_id = update_id

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Blocks until every rank has these tensors, which the trainer broadcasts meanwhile. A failure ends the update,
        and leaves nothing of it on any worker."""
        info = one_of_all(update_info)
        if isinstance(update_info, list):
            workers = members(self._fleet.run("workers", {}))
            check_entries(update_info, world_size(workers) - 1)  # without the trainer's rank
        part = parse_update(info)
        self._report_unknown("update_info", UpdateInfo, info)
        self._fleet.run("receive_weights_part", {**self._begun(), **part_body(part, self._formed())})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commits the update on the whole fleet, or nowhere. `weight_version`: the version's label."""
        label = {} if weight_version is None else {"version": weight_version}
        self._fleet.run("complete_weights_update", {**self._begun(), **label})
        self._update_id = None

    def _report_unknown(self, where: str, model: type[VllmInfo], given: Iterable[str]) -> None:
        """Warns about fields that this client does not know, once for each."""
        for name in unknown_of(model, given):
            if (field := f"{where}.{name}") not in self._reported:
                self._reported.add(field)
                log.warning("the field %.100r has no effect: it is not known here, and is dropped", field)

    def _formed(self) -> Transfer:
        if self._transfer is None:
            raise Conflict("there is no group with the fleet", fix="init_weight_transfer_engine first")
        return self._transfer

    def _begun(self) -> dict[str, str]:
        if self._update_id is None:
            raise Conflict("no update has begun", fix="start_weight_update first")
        return {"update_id": self._update_id}

    def _drop(self) -> None:
        """Aborts an unfinished update.

        An error is raised if that is not possible: the update would drop the next group when it ends. The caller may
        try again.
        """
        if self._update_id is not None:
            try:
                self._fleet.run("abort_weights_update", {"update_id": self._update_id})
            except (Unavailable, DeadlineExceeded):
                raise
            except PlaneError:
                pass  # the update is gone already
        self._update_id = None
