"""Judges the surroundings of a fleet, a line for each check. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from rl_plane.cli.doctor.check_line import CheckLine, error, ok, size, warning
from rl_plane.cli.doctor.doctor_facts import DoctorFacts, NatsFacts, Row
from rl_plane.cli.doctor.root_checks import root_checks
from rl_plane.cli.output import ids
from rl_plane.errors import PermissionDenied
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES
from rl_plane.protocol.generation import RAW_LOGPROBS

OLDEST_NATS = (2, 11)
"""Older servers have no time to live of single messages, which the lock needs."""
FULL = 0.9
"""The share of JetStream's storage that is nearly all of it."""
SLOW_S = 0.1
"""A round trip on one network takes a millisecond. From here on, updates and the lock become slow."""
CLOCK_OFF_S = 2.0
"""The protocol compares no clocks of two machines. More than this makes the times of logs and events hard to read."""
SMALL_SHM = 64 << 20
"""The /dev/shm of a container that was started without --shm-size. Engines with several ranks need more."""
RANK_ENGINES = ("vllm", "sglang")


def examine(facts: DoctorFacts) -> list[CheckLine]:
    """All checks, in the order in which a cause should be looked for."""
    return [
        *_frontend(facts),
        *_nats(facts),
        *_workers(facts),
        *_versions(facts),
        *_logprobs(facts),
        *_transports(facts),
        *_memory(facts),
        *root_checks(facts),
        *_clocks(facts),
    ]


# ---- frontend and keys ----


def _frontend(facts: DoctorFacts) -> Iterator[CheckLine]:
    if facts.about_error is not None:
        fix = str(facts.about_error.get("fix") or "start it, or set --url")
        yield error("frontend", str(facts.about_error["message"]), fix)
    if facts.about is None:
        return
    about = facts.about.reply
    frontend, key = about["frontend"], about["key"]
    yield ok("frontend", f"{frontend['name']} answers at {facts.url}")
    if key["id"]:
        yield ok("key", f"the key for HTTP is {key['id']}, with the role {key['role']}")
    else:
        yield ok("key", f"the frontend needs no key: each process that reaches {facts.url} may steer")
    if not about["nats"]["connected"]:
        fix = "see whether nats-server runs, and whether the frontend's machine reaches it"
        yield error("frontend", f"it has lost NATS at {about['nats']['url']}", fix)
    elif about["serving_lease"] is False:
        yield error("frontend", "it has no serving lease, so it routes nothing", "see whether JetStream answers")


# ---- NATS ----


def _nats(facts: DoctorFacts) -> Iterator[CheckLine]:
    nats = facts.nats
    if nats is None:
        yield warning("NATS", "it was not asked: its address is not known here", "give --nats-url")
        return
    if nats.error is not None:
        words, fix = f"{nats.error['message']}", str(nats.error.get("fix") or "set --nats-url")
        if facts.nats_was_named:
            yield error("NATS", words, fix)
        else:
            yield warning("NATS", f"it can't be asked from this machine: {words}", fix)
            if facts.about is not None and facts.about.reply["nats"]["connected"]:
                yield from _server(facts.about.reply["nats"], None)
        return
    assert nats.server is not None, "it has answered"
    yield from _server(nats.server, nats.round_trip_s)
    if nats.key:
        yield ok("key", f"the key for NATS is {nats.key}" + (f", with the role {nats.role}" if nats.role else ""))
    else:
        yield ok("key", f"NATS needs no key: each process that reaches {nats.url} may steer")
    yield from _jetstream(nats)
    if nats.frontends:
        yield ok("frontend", f"{len(nats.frontends)} deliver tokens now: {ids(nats.frontends)}")
    elif nats.frontends is not None:
        fix = "start one (`rl-plane frontend`), unless this fleet generates without one"
        yield warning("frontend", "none delivers tokens now", fix)


def _server(server: Row, round_trip_s: float | None) -> Iterator[CheckLine]:
    """`round_trip_s` None: it is the server as the frontend knows it."""
    version = str(server["version"])
    words = f"nats-server {version} at {server['url']}"
    words += ", says the frontend" if round_trip_s is None else f", round trip {round_trip_s * 1000:.1f} ms"
    if _numbers(version) < OLDEST_NATS:
        yield error("NATS", words, f"install nats-server {'.'.join(map(str, OLDEST_NATS))} or newer")
    elif round_trip_s is not None and round_trip_s > SLOW_S:
        yield warning("NATS", words, "look at the network, and at the load of the server's machine")
    else:
        yield ok("NATS", words)
    payload = int(server["max_payload"])
    if payload < MAX_MESSAGE_BYTES:
        yield error("NATS", f"max_payload is {size(payload)}", f"set max_payload to {MAX_MESSAGE_BYTES} or more")
    else:
        yield ok("NATS", f"max_payload is {size(payload)}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("-")[0].split(".")[:2] if part.isdigit())


def _jetstream(nats: NatsFacts) -> Iterator[CheckLine]:
    if nats.server is not None and not nats.server["jetstream"]:
        yield error("JetStream", "it is off", "start nats-server with JetStream (`-js`, or `rl-plane nats`)")
        return
    if nats.account is not None:
        yield _account(nats.account)
    else:
        yield warning(
            "JetStream", f"its limits can't be read: {nats.account_error}", "use a key of the role operator"
        )
    for name, config in nats.buckets.items():
        yield _bucket(name, config)
    if nats.write_error is not None:
        yield _write(nats.write_error)
    for name, why in nats.bucket_errors.items():
        yield error("bucket", f"{name}: {why}", "see whether JetStream answers, and the role of the key")


def _write(refused: Row) -> CheckLine:
    if not refused:
        return ok("writes", "the state's bucket takes writes")
    if refused.get("code") == PermissionDenied.code:
        words = "whether the state's bucket takes writes is not known, because this key may not write"
        return warning("writes", words, "use a key of the role operator or frontend")
    fix = str(refused.get("fix") or "see nats-server's log")
    return error("writes", f"the state's bucket takes no writes: {refused['message']}", fix)


def _account(account: Row) -> CheckLine:
    used, most = int(account.get("storage", 0)), int(account.get("limits", {}).get("max_storage", -1))
    words = f"it is on, {size(used)} on disk" + (
        f" of {size(most)}" if most >= 0 else ", without a limit of its own"
    )
    if most >= 0 and used > FULL * most:
        return error(
            "JetStream", words, "raise max_file_store, or remove old streams: a full store takes no decision"
        )
    return ok("JetStream", words)


def _bucket(name: str, config: Row | None) -> CheckLine:
    if config is None:
        return error(
            "bucket", f"{name} is not there", "start a frontend, or name the right namespace and component"
        )
    storage, replicas = config.get("storage"), int(config.get("num_replicas", 1))
    words = f"{name}: {storage} storage, {replicas} cop{'y' if replicas == 1 else 'ies'}"
    if replicas > 1:
        return error(
            "bucket", words, f"`nats stream edit KV_{name} --replicas 1`: the protocol needs the only copy"
        )
    if storage != "file":
        return error(
            "bucket", words, "remove the stream while the fleet is stopped: rl_plane makes it again on disk"
        )
    return ok("bucket", words)


# ---- the workers ----


def _workers(facts: DoctorFacts) -> Iterator[CheckLine]:
    if facts.describe_error is not None:
        fix = str(facts.describe_error.get("fix") or "`rl-plane explain`")
        yield error("workers", str(facts.describe_error["message"]), fix)
    if facts.describe is None:
        return
    failed = [row for row in facts.describe.reply["workers"] if row.get("status") == "error"]
    for row in failed:
        message = row["error"].get("message")
        yield error("worker", f"{row['instance_id']}: {message}", f"`rl-plane explain {row['instance_id']}`")
    if facts.rows:
        engines = Counter(str(row["engine"]) for row in facts.rows)
        listed = ", ".join(f"{count} {name}" for name, count in sorted(engines.items()))
        yield ok("workers", f"{len(facts.rows)} describe themselves ({listed})")
    elif not failed:
        yield error("workers", "there is none", "start workers: `rl-plane worker`; `rl-plane explain` has more")
    for row in facts.rows:
        if not row["host"]["nats"]["connected"]:  # it has answered over another connection than it thinks
            yield warning("worker", f"{row['instance_id']} reconnects to NATS", "look again in a moment")


def _versions(facts: DoctorFacts) -> Iterator[CheckLine]:
    planes: dict[str, list[str]] = defaultdict(list)
    for row in facts.rows:
        planes[row["host"]["version"]].append(f"worker {row['instance_id']}")
    if facts.about is not None:
        planes[facts.about.reply["frontend"]["version"]].append("the frontend")
    planes[facts.version].append("this command")
    yield _agree("versions", "rl_plane", planes, "install one version of rl_plane everywhere")
    engines: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in facts.rows:
        engines[row["engine"]][row["engine_version"]].append(f"worker {row['instance_id']}")
    for engine, versions in sorted(engines.items()):
        yield _agree(
            "versions", engine, versions, f"install one version of {engine}: two may compute other numbers"
        )


def _logprobs(facts: DoctorFacts) -> Iterator[CheckLine]:
    modes: dict[str, list[str]] = defaultdict(list)
    for row in facts.rows:
        if row["task"] == "generate":
            modes[row.get("logprobs_mode", RAW_LOGPROBS)].append(f"worker {row['instance_id']}")
    if len(modes) > 1:
        listed = "; ".join(f"{mode}: {ids(who)}" for mode, who in sorted(modes.items()))
        yield error(
            "logprobs",
            f"--logprobs-mode differs: {listed}",
            "start all workers with the same one: until then requests for logprobs are refused",
        )


def _agree(name: str, what: str, versions: Mapping[str, list[str]], fix: str) -> CheckLine:
    if len(versions) == 1:
        return ok(name, f"{what} {next(iter(versions))} everywhere")
    listed = "; ".join(f"{version}: {ids(who)}" for version, who in sorted(versions.items()))
    return warning(name, f"{what} differs: {listed}", fix)


def _transports(facts: DoctorFacts) -> Iterator[CheckLine]:
    if not facts.rows:
        return
    has: dict[str, set[str]] = defaultdict(set)
    why: dict[str, str] = {}
    everyone = {row["instance_id"] for row in facts.rows}
    for row in facts.rows:
        for name in row["transports"]:
            has[name].add(row["instance_id"])
        for name, reason in row["host"]["lacking"].items():
            why.setdefault(name, str(reason))
        for name, reason in row["lacks"].items():
            if name.startswith("transport:"):
                why[name.partition(":")[2]] = str(reason)
    common = sorted(name for name, there in has.items() if there == everyone)
    if common:
        yield ok("transports", f"all {len(everyone)} workers have {', '.join(common)}")
    else:
        yield error(
            "transports", "no transport is common to all workers", "install the same extras on each worker"
        )
    for name in sorted(has.keys() | why.keys()):
        out = sorted(everyone - has[name])
        if not out:
            continue
        reason = f": {why[name]}" if name in why else ""
        if len(out) == len(everyone):
            yield ok("transports", f"{name} is on no worker{reason}")
        else:
            fix = "install what it needs there, or use another one: an update by it would be refused"
            yield warning("transports", f"{name} is not on {ids(out)}{reason}", fix)


def _memory(facts: DoctorFacts) -> Iterator[CheckLine]:
    hosts: dict[str, list[Row]] = defaultdict(list)
    for row in facts.rows:
        hosts[row["host"]["host"]].append(row)
    for host, rows in sorted(hosts.items()):
        need = sum(int(row["weight_bytes"]) for row in rows)
        rooms = [(row["host"]["free_memory_bytes"], row["host"]["memory_limit"]) for row in rows]
        known = [(int(room), str(limit)) for room, limit in rooms if room is not None]
        if known:
            room, limit = min(known)
            words = f"{host}: a version takes {size(need)} on {len(rows)} workers, {size(room)} are free ({limit})"
            if need > room:
                yield warning("memory", words, "give it more memory, or update with --staging none")
            else:
                yield ok("memory", words)
        shm = [int(row["host"]["shm_free_bytes"]) for row in rows if row["host"]["shm_free_bytes"] is not None]
        if shm:
            yield _shm(host, min(shm), rows)


def _shm(host: str, free: int, rows: list[Row]) -> CheckLine:
    words = f"{host}: {size(free)} are free in /dev/shm"
    if free <= SMALL_SHM and any(row["engine"] in RANK_ENGINES for row in rows):
        return warning("memory", words, "start the container with --shm-size 8g or --ipc host")
    return ok("memory", words)


# ---- clocks ----


def _clocks(facts: DoctorFacts) -> Iterator[CheckLine]:
    off: dict[str, float] = {}
    if facts.about is not None:
        frontend = facts.about.reply["frontend"]
        off[f"the frontend on {frontend['host']}"] = facts.about.clock_off_s(float(frontend["clock"]))
    if facts.nats is not None and facts.nats.clock is not None:
        off["nats-server"] = facts.nats.clock.clock_off_s(float(facts.nats.clock.reply["clock"]))
    if facts.describe is not None:
        for row in facts.rows:
            host = row["host"]
            off[f"worker {row['instance_id']} on {host['host']}"] = facts.describe.clock_off_s(
                float(host["clock"])
            )
    if not off:
        return
    wrong = {who: value for who, value in off.items() if abs(value) > CLOCK_OFF_S}
    for who, value in sorted(wrong.items()):
        side = "ahead of" if value > 0 else "behind"
        fix = "run an NTP client there: the fleet works, but the times of its logs and events mislead"
        yield warning("clocks", f"{who} is {abs(value):.1f} s {side} this machine", fix)
    if not wrong:
        yield ok("clocks", f"{len(off)} clocks are within {CLOCK_OFF_S:g} s of this machine's")
