"""Carries out what a coordinator asks of a worker in an update: prepare, listen, commit, abort."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from rl_plane.errors import Conflict, InvalidRequest, NotPrepared
from rl_plane.protocol.update_requests import (
    AbortUpdate,
    AbortUpdateReply,
    Commit,
    CommittedReply,
    ListeningReply,
    PreparedReply,
    ReceiveRequest,
    ScoresReply,
    Transport,
    UpdateWeights,
)
from rl_plane.protocol.versions import tensors_digest
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S
from worker.reconcile.engine_changes import EngineChanges
from worker.reconcile.instructions import Swap
from worker.reconcile.record_watch import RecordWatch
from worker.reconcile.staged_updates import WeightUpdates
from worker.reconcile.worker_core import WorkerCore


@dataclass(eq=False)
class CoordinatorCalls:
    """The update ops of one worker. `model`: where the weights lie that it was started with."""

    _core: WorkerCore
    _record: RecordWatch
    _changes: EngineChanges
    _updates: WeightUpdates
    _model: Transport
    _tell: Callable[[], None]

    async def prepare(self, request: ReceiveRequest, fence: int) -> PreparedReply:
        """Receives and verifies the weights, in staging or over the served ones."""
        self._core.state.check_weights_here()
        with self._updates.coming(request.update_id):
            return await self._prepare(request, fence)

    async def _prepare(self, request: ReceiveRequest, fence: int) -> PreparedReply:
        self._check(request)
        if request.transport is None:
            return PreparedReply(digest=tensors_digest([]), tensors=0, bytes=0, refetchable=True)
        request = request.with_own_model(self._model)
        if not request.in_place:
            return await self._updates.prepare(request, fence)
        healing = self._updates.receiving
        if healing is not None and healing.fence is None:
            # It may have the turn until it ends, and what it fetches is not wanted any more.
            await self._updates.give_up(healing.update_id)
        async with self._changes.turn(fence):
            self._core.state.check_weights_here()
            return await self._changes.overwrite(request, fence, request.pause_mode, None)

    async def listen(self, request: ReceiveRequest, fence: int) -> ListeningReply:
        """Begins like `prepare`, but answers as soon as every rank listens."""
        self._core.state.check_weights_here()
        if request.transport is None or request.staging == "none":
            raise InvalidRequest(
                "a worker listens only for weights that it stages", field="transport", fix="use prepare_update"
            )
        self._check(request)
        with self._updates.coming(request.update_id):
            await self._updates.listen(request.with_own_model(self._model), fence)
        return ListeningReply(listening=True)

    def _check(self, request: ReceiveRequest) -> None:
        """Refuses a request that this worker or its engine can't carry out."""
        backend = request.transport.backend if request.transport is not None else None
        self._updates.check(request.adapter, request.staging, backend, self._core.state.adapters)

    async def commit(self, body: Commit, fence: int) -> CommittedReply:
        """Carries out the coordinator's decision: swaps what is staged."""
        record = body.record
        async with self._changes.turn(fence):
            self._core.learnt(record, body.sequence, time.monotonic())
            done = self._changes.last_commit
            if done is None or done["version"] != record.made.to_wire():
                # Otherwise the coordinator asks a second time, or the worker has swapped by itself.
                done = CommittedReply(version=record.made.to_wire(), cache_flushed=False, swap_s=0.0)
            numerics = self._core.numerics
            try:
                while (step := self._core.commit_step(record)) is not None:
                    done = await self._changes.step(step, body.pause_s, None) or done
                await self._changes.score_wanted()
            except NotPrepared:
                if numerics.scores_for(record) is None:
                    raise
                # These weights have failed the canary, and are fetched again: the verdict needs what they gave.
            scores = numerics.scores_for(record)
            if scores is not None and numerics.kind is not None:
                vectors = [list(vector) for vector in scores.vectors]
                done = {**done, "canary": ScoresReply(kind=numerics.kind, vectors=vectors)}
        self._changes.look()
        self._tell()
        return done

    async def abort(self, body: AbortUpdate, fence: int) -> AbortUpdateReply:
        """Drops what is received or staged for an undecided update."""
        await self._record.read()
        self._core.state.check_fence(fence)
        self._core.check_undecided(body.update_id)
        found = await self._updates.drop(body.update_id)
        self._changes.look()
        return AbortUpdateReply(discarded=found)

    async def take_alone(self, body: UpdateWeights, fence: int) -> CommittedReply:
        """Prepares and commits on this worker only. Refuses any version but the committed one."""
        self._core.state.check_weights_here()
        await self._record.read()
        record = self._core.record
        assert record is not None
        if body.transport is None or body.target.kind == "lora":
            raise Conflict("one worker alone takes base weights only", field="target", fix="update the fleet")
        if body.encoding != "full":
            raise Conflict(
                "one worker alone takes a full version: only an update of the fleet changes one",
                field="encoding",
                fix="update the fleet",
            )
        self._updates.check(None, body.policy.staging, body.transport.backend)
        label = body.version or record.version.label
        request = ReceiveRequest.of_update(body, f"alone-{secrets.token_hex(8)}", label, None)
        # The weights must prove to be the committed ones before the served ones change, so they are always staged.
        request = request.model_copy(update={"staging": "host", "canary_file": False})
        reply = await self._updates.prepare(request)
        if reply["digest"] != record.version.digest:
            await self._updates.drop(request.update_id)
            raise Conflict(
                f"the fleet has committed {record.version.label} ({record.version.digest}), these weights are "
                f"{reply['digest']}: one worker alone can't take others",
                field="transport",
                fix="update the fleet: POST /v1/rl/update_weights, or RlClient.update_weights",
            )
        async with self._changes.turn(fence):
            self._core.state.check_weights_here()
            staged, done = self._core.staged, None
            if staged is not None and staged.update_id == request.update_id:
                swap = Swap(request.update_id, None, record.version, body.policy.pause_mode)
                pause_s = DEFAULT_PAUSE_LEASE_S if body.policy.keep_pause else 0.0
                done = await self._changes.step(swap, pause_s, None)
            elif self._core.state.version == record.version:  # the worker's own loop was faster
                done = self._changes.last_commit
        self._changes.look()
        if done is None:
            raise Conflict("another update came meanwhile", fix="read the worker's state")
        return done
