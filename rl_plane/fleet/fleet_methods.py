"""The fleet's ops as typed methods. `blocking_fleet_methods.py` is made from this file."""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from rl_plane.protocol.fleet_reply_types import (
    AbortedRequests,
    AbortedUpdate,
    DoneOnAll,
    FleetDescription,
    FleetLiveness,
    FleetMemory,
    FleetReadiness,
    FleetState,
    FleetWeightChecks,
    FleetWorkers,
    LabelledUpdate,
    PastUpdates,
    PausedFleet,
    PreparedUpdate,
    ReceivedPart,
    Selection,
    ServedVersion,
    UpdateReply,
)
from rl_plane.protocol.update_requests import (
    DEFAULT_PACKED_BYTES,
    PART_TIMEOUT_S,
    BaseTarget,
    LoraTarget,
    Transport,
    UpdatePolicy,
)
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S

PauseWord = Literal["keep", "wait", "abort", "retract", "in_place"]
Memory = Literal["weights", "kv_cache"]


class FleetMethods(ABC):
    """One typed method for each op of the fleet.

    `**select` in each method is a `Selection`: `component`, `workers`, `epoch`, `fingerprint`, `min_workers` (1) and
    `wait_s` (5). Every method raises a PlaneError unless the call is a complete success. Its facts name every worker.
    Besides the errors that a method lists, each may raise:

    * InvalidRequest: an argument is wrong; the message names it and the fix.
    * NoWorkers: fewer than `min_workers` are in the fleet after `wait_s`.
    * MembershipChanged: the fleet is not the one of `epoch` and `fingerprint`.
    * BusUnreachable: NATS does not answer.
    """

    @abstractmethod
    async def run(
        self, op: str, body: dict[str, Any] | None = None, request_id: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Carries out any op of `rl_plane.protocol.fleet_ops.FLEET_OPS`.

        Args:
            op: The op's name.
            body: Its fields and those of the selection, as over HTTP.
            request_id: Makes an update idempotent: a repeated call returns the first answer.
            timeout_s: Seconds until the call is cancelled. None: the op's own bounds.

        Raises:
            DeadlineExceeded: the call has not ended within `timeout_s`.
        """

    # ---- reading ----

    async def liveness(self, **select: Unpack[Selection]) -> FleetLiveness:
        """Makes a round trip through each engine.

        Raises:
            Unavailable: an engine has not answered within 5 seconds.
        """
        return typing.cast(FleetLiveness, await self.run("liveness", {**select}))

    async def ready(self, **select: Unpack[Selection]) -> FleetReadiness:
        """Checks that `min_workers` admitted workers hold the committed version. Waits only if `wait_s` is given.

        Raises:
            Unavailable: fewer workers are ready.
        """
        return typing.cast(FleetReadiness, await self.run("ready", {**select}))

    async def state(self, **select: Unpack[Selection]) -> FleetState:
        """Reads the fleet's state and each worker's: admission, pause, version and load."""
        return typing.cast(FleetState, await self.run("state", {**select}))

    async def workers(self, **select: Unpack[Selection]) -> FleetWorkers:
        """Lists the workers with their registration and state."""
        return typing.cast(FleetWorkers, await self.run("workers", {**select}))

    async def weight_version(self, **select: Unpack[Selection]) -> ServedVersion:
        """Reads the one version that all admitted workers serve.

        Raises:
            Conflict: the workers serve several versions.
        """
        return typing.cast(ServedVersion, await self.run("weight_version", {**select}))

    async def describe(self, *, manifest_from: int | None = None, **select: Unpack[Selection]) -> FleetDescription:
        """Reads what each engine is and can do.

        Args:
            manifest_from: Also list the model's tensors, 1000 from this one on. `workers` must then name one worker.
                None: no tensors.
        """
        return typing.cast(
            FleetDescription, await self.run("describe", _given(manifest_from=manifest_from, **select))
        )

    async def updates(self, limit: int = 50, **select: Unpack[Selection]) -> PastUpdates:
        """Lists past updates, newest first.

        Args:
            limit: How many, at most 256.
        """
        return typing.cast(PastUpdates, await self.run("updates", {"limit": limit, **select}))

    async def check_weights(
        self,
        action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum",
        *,
        closed: bool = False,
        **select: Unpack[Selection],
    ) -> FleetWeightChecks:
        """Checks the weights of each rank.

        Args:
            action: `checksum` computes a checksum; `snapshot` stores a copy; `compare` compares with that copy;
                `reset_tensors` overwrites the weights, for tests.
            closed: Close admission meanwhile, because the check delays the engine.
        """
        return typing.cast(
            FleetWeightChecks, await self.run("check_weights", {"action": action, "closed": closed, **select})
        )

    # ---- generation ----

    async def pause(
        self,
        mode: PauseWord = "keep",
        *,
        clear_cache: bool | None = None,
        lease_s: float = DEFAULT_PAUSE_LEASE_S,
        **select: Unpack[Selection],
    ) -> PausedFleet:
        """Stops generation on every worker.

        Args:
            mode: `keep` freezes requests between two tokens, `wait` lets them end first, `abort` ends them now.
                SGLang's `retract` is `keep` with `clear_cache`, its `in_place` is `keep` without.
            clear_cache: Also drop the prefix caches. None: as the mode says.
            lease_s: Seconds after which the fleet resumes by itself.

        Raises:
            Conflict: the pause has failed on some workers.
        """
        body = _given(mode=mode, clear_cache=clear_cache, lease_s=lease_s, **select)
        return typing.cast(PausedFleet, await self.run("pause", body))

    async def resume(self, **select: Unpack[Selection]) -> PausedFleet:
        """Ends a pause on every worker. Frozen requests continue.

        Raises:
            Conflict: some workers could not resume.
        """
        return typing.cast(PausedFleet, await self.run("resume", {**select}))

    async def flush_cache(self, **select: Unpack[Selection]) -> DoneOnAll:
        """Drops the prefix caches."""
        return typing.cast(DoneOnAll, await self.run("flush_cache", {**select}))

    async def abort_requests(
        self, request_ids: Sequence[str] | None = None, **select: Unpack[Selection]
    ) -> AbortedRequests:
        """Ends requests now. Each returns the tokens that it has so far.

        Args:
            request_ids: The ids of replies or of single choices (`<id>-<index>`). None: all requests.

        Raises:
            Unavailable: a frontend has not answered; requests that wait there continue.
        """
        ids = None if request_ids is None else list(request_ids)
        return typing.cast(AbortedRequests, await self.run("abort_requests", _given(request_ids=ids, **select)))

    async def enable(self, workers: Sequence[str], *, component: str | None = None) -> DoneOnAll:
        """Admits workers again that were disabled.

        Args:
            workers: Instance ids.
            component: Their component. None: the client's.
        """
        return typing.cast(DoneOnAll, await self.run("enable", _given(workers=list(workers), component=component)))

    async def disable(self, workers: Sequence[str], *, component: str | None = None) -> DoneOnAll:
        """Takes workers out of routing until they are enabled. Their requests continue.

        Args:
            workers: Instance ids.
            component: Their component. None: the client's.
        """
        return typing.cast(
            DoneOnAll, await self.run("disable", _given(workers=list(workers), component=component))
        )

    # ---- weights ----

    async def update_weights(
        self,
        transport: Transport | Mapping[str, Any],
        version: str | None = None,
        *,
        target: BaseTarget | LoraTarget | None = None,
        policy: UpdatePolicy | None = None,
        digest: str | None = None,
        encoding: Literal["full", "delta"] = "full",
        base: str | None = None,
        step: int | None = None,
        cast: bool = False,
        request_id: str = "",
        **select: Unpack[Selection],
    ) -> UpdateReply:
        """Commits new weights on the whole fleet, or on no worker.

        Args:
            transport: Where the weights are: `{"backend": "filesystem", "path": …}`, or the fields of another backend.
            version: The trainer's label, such as `step_17`. None: the sequence number.
            target: A LoRA adapter, or what becomes of loaded adapters. None: the base weights; adapters stay loaded.
            policy: How the update is carried out, with its time-outs. None: the defaults of UpdatePolicy.
            digest: The digest that the trainer has computed, `blake3:…`. None: the workers' digests must agree.
            encoding: `delta` sends only the changes since `base`; `digest` is then needed.
            base: The digest of the committed version that a delta changes.
            step: The trainer's step, for the history.
            cast: Allow another float dtype than the engine's.
            request_id: Makes the call idempotent: a repeated call returns the first answer.

        Returns:
            The committed version, and the members that do not serve it yet.

        Raises:
            UpdateAborted: a worker could not prepare; the fleet serves the version before.
            InvalidWeights: the weights do not fit the model, or have another digest.
            CanaryFailed: the engines compute other values than they should.
            Locked: another update is under way.
            OutcomeUnknown: NATS was lost at the decision. Repeat the call with the same `request_id`.
        """
        body = _update_body(transport, version, target, policy, digest, encoding, base, step, cast)
        return typing.cast(
            UpdateReply, await self.run("update_weights", {**body, **select}, request_id=request_id)
        )

    async def rollback(
        self,
        label: str | None = None,
        *,
        sequence: int | None = None,
        version: str | None = None,
        policy: UpdatePolicy | None = None,
        request_id: str = "",
        **select: Unpack[Selection],
    ) -> UpdateReply:
        """Commits an earlier version of the history again. Give its label or its sequence.

        Args:
            label: The label. If several versions have it, they must have the same digest.
            sequence: The sequence number.
            version: A new label. None: the label that it had.
            policy: How the update is carried out. None: the defaults of UpdatePolicy.
            request_id: Makes the call idempotent: a repeated call returns the first answer.

        Raises:
            NotFound: the history has no such version; the facts list its versions.
            Conflict: its weights can't be fetched again.
        """
        body = _given(
            rollback=_given(label=label, sequence=sequence), version=version, policy=_policy(policy), **select
        )
        return typing.cast(UpdateReply, await self.run("update_weights", body, request_id=request_id))

    async def load_lora_adapter(
        self, name: str, path: str, *, cast: bool = False, request_id: str = "", **select: Unpack[Selection]
    ) -> UpdateReply:
        """Loads a LoRA adapter from a directory on every worker, or replaces the adapter of this name.

        Args:
            name: The name by which requests select it.
            path: A PEFT directory beneath the workers' weight roots.
            cast: Allow another float dtype than the engine's.
            request_id: Makes the call idempotent: a repeated call returns the first answer.
        """
        body = {"lora_name": name, "lora_path": path, "cast": cast, **select}
        return typing.cast(UpdateReply, await self.run("load_lora_adapter", body, request_id=request_id))

    async def unload_lora_adapter(
        self, name: str, *, request_id: str = "", **select: Unpack[Selection]
    ) -> UpdateReply:
        """Unloads a LoRA adapter on every worker.

        Args:
            name: The adapter.
            request_id: Makes the call idempotent: a repeated call returns the first answer.
        """
        body = {"lora_name": name, **select}
        return typing.cast(UpdateReply, await self.run("unload_lora_adapter", body, request_id=request_id))

    async def new_run(self, *, request_id: str = "", **select: Unpack[Selection]) -> UpdateReply:
        """Begins a new run. Its sequence 0 is the model that every worker was started with.

        Args:
            request_id: Makes the call idempotent: a repeated call returns the first answer.
        """
        return typing.cast(UpdateReply, await self.run("new_run", {**select}, request_id=request_id))

    # ---- an update in several calls ----

    async def prepare_weights_update(
        self,
        transport: Transport | Mapping[str, Any],
        version: str | None = None,
        *,
        target: BaseTarget | LoraTarget | None = None,
        policy: UpdatePolicy | None = None,
        digest: str | None = None,
        encoding: Literal["full", "delta"] = "full",
        base: str | None = None,
        step: int | None = None,
        cast: bool = False,
        request_id: str = "",
        **select: Unpack[Selection],
    ) -> PreparedUpdate:
        """Stages an update on every worker, or makes the workers listen for weights that the trainer pushes.

        Generation continues. `complete_weights_update` commits the update. It expires 120 seconds after its last call.
        The arguments and errors are those of `update_weights`.
        """
        body = _update_body(transport, version, target, policy, digest, encoding, base, step, cast)
        reply = await self.run("prepare_weights_update", {**body, **select}, request_id=request_id)
        return typing.cast(PreparedUpdate, reply)

    async def receive_weights_part(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        layout: Literal["each", "flat", "packed"] = "each",
        bucket_bytes: int = DEFAULT_PACKED_BYTES,
        group: str | None = None,
        timeout_s: float = PART_TIMEOUT_S,
        check_only: bool = False,
        update_id: str | None = None,
        version: str | None = None,
        pause_mode: Literal["keep", "wait", "abort"] | None = None,
        **select: Unpack[Selection],
    ) -> ReceivedPart:
        """Receives tensors that the trainer broadcasts now, on every rank, in this order.

        Args:
            names: The tensors' names.
            dtypes: Their dtypes, as torch (`bfloat16`) or safetensors (`BF16`) calls them.
            shapes: Their shapes.
            layout: `each`: one broadcast for each tensor. `flat`: one for all of their bytes. `packed`: one for each
                `bucket_bytes`.
            bucket_bytes: Bytes of one broadcast in the layout `packed`.
            group: The group of the broadcasts. None: the group that the update was prepared with.
            timeout_s: Seconds until every rank has the tensors.
            check_only: Only compare the names and shapes with the model.
            update_id: The prepared update. None: the update that waits.
            version: The update's label. None: as before.
            pause_mode: Replaces the policy's mode from now on. None: as before.
        """
        body = _given(
            names=list(names),
            dtypes=list(dtypes),
            shapes=[list(shape) for shape in shapes],
            layout=layout,
            bucket_bytes=bucket_bytes,
            group=group,
            timeout_s=timeout_s,
            check_only=check_only,
            update_id=update_id,
            version=version,
            pause_mode=pause_mode,
            **select,
        )
        return typing.cast(ReceivedPart, await self.run("receive_weights_part", body))

    async def label_weights_update(
        self, version: str, *, update_id: str | None = None, **select: Unpack[Selection]
    ) -> LabelledUpdate:
        """Labels the prepared update before it is committed.

        Args:
            version: The label, such as `step_17`.
            update_id: The prepared update. None: the update that waits.

        Raises:
            NotPrepared: no update is prepared.
        """
        body = _given(version=version, update_id=update_id, **select)
        return typing.cast(LabelledUpdate, await self.run("label_weights_update", body))

    async def complete_weights_update(
        self,
        update_id: str | None = None,
        *,
        version: str | None = None,
        digest: str | None = None,
        num_buckets: int | None = None,
        **select: Unpack[Selection],
    ) -> UpdateReply:
        """Commits the prepared update. A repeated call with its `update_id` returns the first answer.

        Args:
            update_id: The prepared update. None: the update that waits.
            version: Its label. None: as it was prepared.
            digest: The digest of the weights that were sent. None: as it was prepared.
            num_buckets: How many buckets were sent. None: not checked.

        Raises:
            NotPrepared: no update is prepared.
            UpdateAborted: a worker has not received the weights; the fleet serves the version before.
        """
        body = _given(update_id=update_id, version=version, digest=digest, num_buckets=num_buckets, **select)
        return typing.cast(UpdateReply, await self.run("complete_weights_update", body))

    async def abort_weights_update(
        self, update_id: str | None = None, **select: Unpack[Selection]
    ) -> AbortedUpdate:
        """Drops the prepared update. The fleet serves the version before.

        Args:
            update_id: The prepared update. None: the update that waits.

        Raises:
            NotPrepared: no update is prepared.
        """
        return typing.cast(
            AbortedUpdate, await self.run("abort_weights_update", _given(update_id=update_id, **select))
        )

    # ---- transports and memory ----

    async def init_transport(
        self, backend: str, options: Mapping[str, Any] | None = None, **select: Unpack[Selection]
    ) -> DoneOnAll:
        """Sets up a transport that outlives one update, such as a group. Repeated calls change nothing.

        Args:
            backend: The transport's name.
            options: Its own fields. None: none.
        """
        body = {"backend": backend, **(options or {}), **select}
        return typing.cast(DoneOnAll, await self.run("init_transport", body))

    async def destroy_transport(
        self, backend: str, *, group: str | None = None, **select: Unpack[Selection]
    ) -> DoneOnAll:
        """Takes a transport down.

        Args:
            backend: The transport's name.
            group: One of the groups that a trainer has formed by itself. None: all.
        """
        body = _given(backend=backend, group=group, **select)
        return typing.cast(DoneOnAll, await self.run("destroy_transport", body))

    async def release_memory(
        self, tags: Sequence[Memory] = ("weights", "kv_cache"), **select: Unpack[Selection]
    ) -> FleetMemory:
        """Releases GPU memory on every worker.

        Args:
            tags: Which memory.

        Raises:
            Unsupported: an engine can't release memory; no worker is changed.
        """
        return typing.cast(FleetMemory, await self.run("release_memory", {"tags": list(tags), **select}))

    async def resume_memory(
        self, tags: Sequence[Memory] = ("weights", "kv_cache"), **select: Unpack[Selection]
    ) -> FleetMemory:
        """Takes released GPU memory again on every worker.

        Args:
            tags: Which memory.
        """
        return typing.cast(FleetMemory, await self.run("resume_memory", {"tags": list(tags), **select}))


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _policy(policy: UpdatePolicy | None) -> dict[str, Any] | None:
    return None if policy is None else policy.model_dump(exclude_unset=True)


def _update_body(
    transport: Transport | Mapping[str, Any],
    version: str | None,
    target: BaseTarget | LoraTarget | None,
    policy: UpdatePolicy | None,
    digest: str | None,
    encoding: str,
    base: str | None,
    step: int | None,
    cast: bool,
) -> dict[str, Any]:
    """The body of `update_weights` and `prepare_weights_update`."""
    return _given(
        transport=transport.model_dump() if isinstance(transport, Transport) else dict(transport),
        version=version,
        target=None if target is None else target.model_dump(),
        policy=_policy(policy),
        digest=digest,
        encoding=encoding,
        base=base,
        step=step,
        cast=cast,
    )
