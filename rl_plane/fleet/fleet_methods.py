"""The fleet's ops as typed methods, for RlClient and SyncRlClient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from rl_plane.fleet.fleet_method import FleetRequest, fleet_method
from rl_plane.protocol.fleet_reply_types import (
    AbortedRequests,
    AbortedUpdate,
    DoneOnAll,
    FleetAdmission,
    FleetDescription,
    FleetLiveness,
    FleetMemory,
    FleetReadiness,
    FleetState,
    FleetWeightChecks,
    FleetWorkers,
    FlushedFleet,
    FormedTransport,
    LabelledUpdate,
    PastUpdates,
    PausedFleet,
    PreparedUpdate,
    ReceivedPart,
    Selection,
    ServedVersion,
    UpdateReply,
)
from rl_plane.protocol.record import Encoding
from rl_plane.protocol.update_requests import (
    DEFAULT_PACKED_BYTES,
    PART_TIMEOUT_S,
    BaseTarget,
    LoraTarget,
    Transport,
    UpdatePolicy,
    update_arguments,
)
from rl_plane.protocol.versions import DigestAlgorithm
from rl_plane.protocol.worker_ops import DEFAULT_PAUSE_LEASE_S

PauseWord = Literal["keep", "wait", "abort", "retract", "in_place"]
Memory = Literal["weights", "kv_cache"]


class UpdateKeywords(Selection, total=False):
    """The keywords of `update_weights` and `prepare_weights_update`, beside `request_id`. `update_weights` documents
    each, and the model of its request has the defaults."""

    target: BaseTarget | LoraTarget | Mapping[str, Any] | None
    policy: UpdatePolicy | Mapping[str, Any] | None
    digest: str | None
    digest_algorithm: DigestAlgorithm | None
    encoding: Encoding
    base: str | None
    step: int | None
    cast: bool


class FleetMethods:
    """One typed method for each op of the fleet. Each one builds its request, and the client's `run` carries it out: a
    method of RlClient is awaited, and a method of SyncRlClient blocks. The reply has the type in `FleetRequest[…]`.

    `**select` in each method is a `Selection`: `component`, `workers`, `epoch`, `fingerprint`, `min_workers` (1) and
    `wait_s` (5). `UpdateKeywords` has these keys too. Every method raises a PlaneError unless the call is a complete
    success. Its facts name every worker. Besides the errors that a method lists, each may raise:

    * InvalidRequest: an argument is wrong; the message names it and the fix.
    * NoWorkers: fewer than `min_workers` are in the fleet after `wait_s`.
    * MembershipChanged: the fleet is not the one of `epoch` and `fingerprint`.
    * BusUnreachable: NATS does not answer.
    """

    # ---- reading ----

    @fleet_method
    def liveness(self, **select: Unpack[Selection]) -> FleetRequest[FleetLiveness]:
        """Makes a round trip through each engine.

        Raises:
            Unavailable: an engine has not answered within 5 seconds.
        """
        return FleetRequest("liveness", {**select})

    @fleet_method
    def ready(self, **select: Unpack[Selection]) -> FleetRequest[FleetReadiness]:
        """Checks that `min_workers` admitted workers hold the committed version. Waits only if `wait_s` is given.

        Raises:
            Unavailable: fewer workers are ready.
        """
        return FleetRequest("ready", {**select})

    @fleet_method
    def state(self, **select: Unpack[Selection]) -> FleetRequest[FleetState]:
        """Reads the fleet's state and each worker's: admission, pause, version and load."""
        return FleetRequest("state", {**select})

    @fleet_method
    def workers(self, **select: Unpack[Selection]) -> FleetRequest[FleetWorkers]:
        """Lists the workers with their registration and state."""
        return FleetRequest("workers", {**select})

    @fleet_method
    def weight_version(self, **select: Unpack[Selection]) -> FleetRequest[ServedVersion]:
        """Reads the one version that all admitted workers serve.

        Raises:
            Conflict: the workers serve several versions.
        """
        return FleetRequest("weight_version", {**select})

    @fleet_method
    def describe(
        self,
        *,
        manifest_from: int | None = None,
        host: bool = False,
        weight_roots: Sequence[str] | None = None,
        **select: Unpack[Selection],
    ) -> FleetRequest[FleetDescription]:
        """Reads what each engine is and can do.

        Args:
            manifest_from: Also list the model's tensors, 1000 from this one on. `workers` must then name one worker.
                None: no tensors.
            host: Also report what each worker sees of its machine.
            weight_roots: With `host`: directories beneath the configured weight roots, at which each worker looks too.
                None: only the configured ones.
        """
        roots = weight_roots if weight_roots is None or isinstance(weight_roots, str) else list(weight_roots)
        body = _given(manifest_from=manifest_from, host=host, weight_roots=roots, **select)
        return FleetRequest("describe", body)

    @fleet_method
    def updates(self, limit: int = 50, **select: Unpack[Selection]) -> FleetRequest[PastUpdates]:
        """Lists past updates, newest first.

        Args:
            limit: How many, at most 256.
        """
        return FleetRequest("updates", {"limit": limit, **select})

    @fleet_method
    def check_weights(
        self,
        action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum",
        *,
        closed: bool = False,
        per_tensor: bool = False,
        skip_tensor_list: Sequence[str] = (),
        **select: Unpack[Selection],
    ) -> FleetRequest[FleetWeightChecks]:
        """Checks the weights of each rank.

        Args:
            action: `checksum` computes a checksum; `snapshot` stores a copy; `compare` compares with that copy;
                `reset_tensors` overwrites the weights, for tests.
            closed: Close admission meanwhile, because the check delays the engine.
            per_tensor: A checksum has the hash of each tensor too.
            skip_tensor_list: Checksum and compare leave out the tensors whose names contain one of these texts.
        """
        scope = {"per_tensor": per_tensor, "skip_tensor_list": list(skip_tensor_list)}
        return FleetRequest("check_weights", {"action": action, "closed": closed, **scope, **select})

    # ---- generation ----

    @fleet_method
    def pause(
        self,
        mode: PauseWord = "keep",
        *,
        clear_cache: bool | None = None,
        lease_s: float = DEFAULT_PAUSE_LEASE_S,
        **select: Unpack[Selection],
    ) -> FleetRequest[PausedFleet]:
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
        return FleetRequest("pause", body)

    @fleet_method
    def resume(self, **select: Unpack[Selection]) -> FleetRequest[PausedFleet]:
        """Ends a pause on every worker. Frozen requests continue.

        Raises:
            Conflict: some workers could not resume.
        """
        return FleetRequest("resume", {**select})

    @fleet_method
    def flush_cache(
        self, *, reset_running_requests: bool = False, **select: Unpack[Selection]
    ) -> FleetRequest[FlushedFleet]:
        """Drops the prefix caches.

        Args:
            reset_running_requests: Freeze running requests meanwhile. They compute their KV again.

        Raises:
            Conflict: an engine has running requests, and did not drop its cache.
        """
        return FleetRequest("flush_cache", {"reset_running_requests": reset_running_requests, **select})

    @fleet_method
    def abort_requests(
        self, request_ids: Sequence[str] | None = None, **select: Unpack[Selection]
    ) -> FleetRequest[AbortedRequests]:
        """Ends requests now. Each returns the tokens that it has so far.

        Args:
            request_ids: The ids of replies, the callers' own names of requests, or single choices (`<id>-<index>`).
                None: all requests.

        Raises:
            Unavailable: a frontend has not answered; requests that only it knows continue.
        """
        ids = None if request_ids is None else list(request_ids)
        return FleetRequest("abort_requests", _given(request_ids=ids, **select))

    @fleet_method
    def enable(self, workers: Sequence[str], *, component: str | None = None) -> FleetRequest[FleetAdmission]:
        """Admits workers again that were disabled.

        Args:
            workers: Instance ids.
            component: Their component. None: the client's.
        """
        return FleetRequest("enable", _given(workers=list(workers), component=component))

    @fleet_method
    def disable(self, workers: Sequence[str], *, component: str | None = None) -> FleetRequest[FleetAdmission]:
        """Takes workers out of routing until they are enabled. Their requests continue.

        Args:
            workers: Instance ids.
            component: Their component. None: the client's.
        """
        return FleetRequest("disable", _given(workers=list(workers), component=component))

    # ---- weights ----

    @fleet_method
    def update_weights(
        self,
        transport: Transport | Mapping[str, Any],
        version: str | None = None,
        *,
        request_id: str = "",
        **keywords: Unpack[UpdateKeywords],
    ) -> FleetRequest[UpdateReply]:
        """Commits new weights on the whole fleet, or on no worker.

        Args:
            transport: Where the weights are: `{"backend": "filesystem", "path": …}`, or the fields of another backend,
                as a mapping or as a `Transport`.
            version: The trainer's label, such as `step_17`. None: the sequence number.
            target: A `LoraTarget` means an adapter. A `BaseTarget` means the base weights, and says whether loaded
                adapters stay. A mapping of their fields means the same. None: the base weights; adapters stay loaded.
            policy: How the update is carried out, with its time-outs: an `UpdatePolicy`, or a mapping of its fields.
                None: the defaults of UpdatePolicy.
            digest: The trainer's digest, `xxh3:…` or `blake3:…`. None: the workers' digests must agree.
            digest_algorithm: The hash, where neither `digest` nor digests beside the weights tell it. None: `xxh3`.
            encoding: `full`, the default, sends every tensor. `delta` sends only the changed elements since `base`,
                `partial` only the changed tensors; `digest` is then needed.
            base: The digest of the committed version that a delta or a partial version changes.
            step: The trainer's step, for the history.
            cast: Allow another float dtype than the engine's.
            request_id: Makes the call idempotent: a repeated call returns the first answer.
            keywords: Beside the arguments from `target` to `cast`, the keys of a `Selection`.

        Returns:
            The committed version, and the members that do not serve it yet.

        Raises:
            UpdateAborted: a worker could not prepare; the fleet serves the version before.
            InvalidWeights: the weights do not fit the model, or have another digest.
            CanaryFailed: the engines compute other values than they should.
            Locked: another update is under way.
            OutcomeUnknown: NATS was lost at the decision. Repeat the call with the same `request_id`.
        """
        return FleetRequest("update_weights", _update_body(transport, version, keywords), request_id)

    @fleet_method
    def rollback(
        self,
        label: str | None = None,
        *,
        sequence: int | None = None,
        version: str | None = None,
        policy: UpdatePolicy | Mapping[str, Any] | None = None,
        request_id: str = "",
        **select: Unpack[Selection],
    ) -> FleetRequest[UpdateReply]:
        """Commits an earlier version of the history again. Give its label or its sequence.

        Args:
            label: The label. If several versions have it, they must have the same digest.
            sequence: The sequence number.
            version: A new label. None: the label that it had.
            policy: How the update is carried out: an `UpdatePolicy`, or a mapping of its fields. None: the defaults of
                UpdatePolicy.
            request_id: Makes the call idempotent: a repeated call returns the first answer.

        Raises:
            NotFound: the history has no such version; the facts list its versions.
            Conflict: its weights can't be fetched again.
        """
        body = _given(
            rollback=_given(label=label, sequence=sequence),
            version=version,
            **update_arguments(policy=policy),
            **select,
        )
        return FleetRequest("update_weights", body, request_id)

    @fleet_method
    def load_lora_adapter(
        self, name: str, path: str, *, cast: bool = False, request_id: str = "", **select: Unpack[Selection]
    ) -> FleetRequest[UpdateReply]:
        """Loads a LoRA adapter from a directory on every worker, or replaces the adapter of this name.

        Args:
            name: The name by which requests select it.
            path: A PEFT directory beneath the workers' weight roots.
            cast: Allow another float dtype than the engine's.
            request_id: Makes the call idempotent: a repeated call returns the first answer.
        """
        body = {"lora_name": name, "lora_path": path, "cast": cast, **select}
        return FleetRequest("load_lora_adapter", body, request_id)

    @fleet_method
    def unload_lora_adapter(
        self, name: str, *, request_id: str = "", **select: Unpack[Selection]
    ) -> FleetRequest[UpdateReply]:
        """Unloads a LoRA adapter on every worker.

        Args:
            name: The adapter.
            request_id: Makes the call idempotent: a repeated call returns the first answer.
        """
        body = {"lora_name": name, **select}
        return FleetRequest("unload_lora_adapter", body, request_id)

    @fleet_method
    def new_run(self, *, request_id: str = "", **select: Unpack[Selection]) -> FleetRequest[UpdateReply]:
        """Begins a new run. Its sequence 0 is the model that every worker was started with.

        Args:
            request_id: Makes the call idempotent: a repeated call returns the first answer.
        """
        return FleetRequest("new_run", {**select}, request_id)

    # ---- an update in several calls ----

    @fleet_method
    def prepare_weights_update(
        self,
        transport: Transport | Mapping[str, Any],
        version: str | None = None,
        *,
        request_id: str = "",
        **keywords: Unpack[UpdateKeywords],
    ) -> FleetRequest[PreparedUpdate]:
        """Stages an update on every worker, or makes the workers listen for weights that the trainer pushes.

        Generation continues. `complete_weights_update` commits the update. It expires 120 seconds after its last call.
        The arguments and errors are those of `update_weights`.
        """
        return FleetRequest("prepare_weights_update", _update_body(transport, version, keywords), request_id)

    @fleet_method
    def receive_weights_part(
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
        kv: Literal["recompute", "keep"] | None = None,
        **select: Unpack[Selection],
    ) -> FleetRequest[ReceivedPart]:
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
            kv: Replaces the policy's `kv` from now on. None: as before.
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
            kv=kv,
            **select,
        )
        return FleetRequest("receive_weights_part", body)

    @fleet_method
    def label_weights_update(
        self, version: str, *, update_id: str | None = None, **select: Unpack[Selection]
    ) -> FleetRequest[LabelledUpdate]:
        """Labels the prepared update before it is committed.

        Args:
            version: The label, such as `step_17`.
            update_id: The prepared update. None: the update that waits.

        Raises:
            UpdateAborted: no update is prepared.
        """
        body = _given(version=version, update_id=update_id, **select)
        return FleetRequest("label_weights_update", body)

    @fleet_method
    def complete_weights_update(
        self,
        update_id: str | None = None,
        *,
        version: str | None = None,
        digest: str | None = None,
        num_buckets: int | None = None,
        kv: Literal["recompute", "keep"] | None = None,
        **select: Unpack[Selection],
    ) -> FleetRequest[UpdateReply]:
        """Commits the prepared update. A repeated call with its `update_id` returns the first answer.

        Args:
            update_id: The prepared update. None: the update that waits.
            version: Its label. None: as it was prepared.
            digest: The digest of the weights that were sent. None: as it was prepared.
            num_buckets: How many buckets were sent. None: not checked.
            kv: Replaces the policy's `kv`. None: as it was prepared.

        Raises:
            UpdateAborted: no update is prepared, or a worker has not received the weights. The fleet serves the version
                before.
        """
        body = _given(
            update_id=update_id, version=version, digest=digest, num_buckets=num_buckets, kv=kv, **select
        )
        return FleetRequest("complete_weights_update", body)

    @fleet_method
    def abort_weights_update(
        self, update_id: str | None = None, *, by: str | None = None, **select: Unpack[Selection]
    ) -> FleetRequest[AbortedUpdate]:
        """Ends an update before its decision. The fleet serves the version before.

        Args:
            update_id: The update, as `state` names it. None: the update that runs, or waits for its next call.
            by: The person or process that aborts it, in words for its trainer. None: this process.

        Raises:
            UpdateAborted: no such update runs.
            Conflict: it is committed.
        """
        return FleetRequest("abort_weights_update", _given(update_id=update_id, by=by, **select))

    # ---- transports and memory ----

    @fleet_method
    def init_transport(
        self, backend: str, options: Mapping[str, Any] | None = None, **select: Unpack[Selection]
    ) -> FleetRequest[FormedTransport]:
        """Sets up a transport that outlives one update, such as a group. Repeated calls change nothing.

        Args:
            backend: The transport's name.
            options: Its own fields. None: none.
        """
        body = {"backend": backend, **(options or {}), **select}
        return FleetRequest("init_transport", body)

    @fleet_method
    def destroy_transport(
        self, backend: str, *, group: str | None = None, **select: Unpack[Selection]
    ) -> FleetRequest[DoneOnAll]:
        """Takes a transport down.

        Args:
            backend: The transport's name.
            group: One of the groups that a trainer has formed by itself. None: all.
        """
        body = _given(backend=backend, group=group, **select)
        return FleetRequest("destroy_transport", body)

    @fleet_method
    def release_memory(
        self, tags: Sequence[Memory] = ("weights", "kv_cache"), **select: Unpack[Selection]
    ) -> FleetRequest[FleetMemory]:
        """Releases GPU memory on every worker.

        Args:
            tags: Which memory.

        Raises:
            Unsupported: an engine can't release memory; no worker is changed.
        """
        return FleetRequest("release_memory", {"tags": list(tags), **select})

    @fleet_method
    def resume_memory(
        self, tags: Sequence[Memory] = ("weights", "kv_cache"), **select: Unpack[Selection]
    ) -> FleetRequest[FleetMemory]:
        """Takes released GPU memory again on every worker.

        Args:
            tags: Which memory.
        """
        return FleetRequest("resume_memory", {"tags": list(tags), **select})


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _update_body(
    transport: Transport | Mapping[str, Any],
    version: str | None,
    keywords: UpdateKeywords,
) -> dict[str, Any]:
    """The body of `update_weights` and `prepare_weights_update`."""
    models = update_arguments(transport=transport, target=keywords.get("target"), policy=keywords.get("policy"))
    return _given(version=version, **{**keywords, **models})
