"""Formats the replies of the fleet for a person."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rl_plane.cli.output import clock, counted, exit_words, one_line, table
from rl_plane.commit.running_update import BEFORE_DECISION
from rl_plane.protocol.envelope import engine_replies
from rl_plane.protocol.relay import TRAINER
from rl_plane.protocol.subjects import USER_KEY

Reply = Mapping[str, Any]

STATE_COLUMNS = {
    "INSTANCE": "instance_id",
    "ENGINE": "engine",
    "READY": "ready",
    "PAUSE": "pause",
    "ADMISSION": "admission",
    "VERSION": "version",
    "CANARY": "canary",
    "RUNNING": "running",
    "WAITING": "waiting",
}
WORKER_COLUMNS = {
    "INSTANCE": "instance_id",
    "ENGINE": "engine",
    "MODEL": "model",
    "HOST": "host",
    "PID": "pid",
    "ADMISSION": "admission",
    "VERSION": "version",
    "CANARY": "canary",
}
NODE_COLUMNS = {"INSTANCE": "instance_id", "NODE": "node_rank", "HOST": "host", "PID": "pid", "RANKS": "ranks"}
UPDATE_COLUMNS = {
    "BEGAN": "began",
    "OUTCOME": "outcome",
    "VERSION": "version",
    "WORKERS": "workers",
    "SECONDS": "seconds",
    "CANARY": "canary",
    "WHO": "who",
    "WHY": "why",
}
WHY_CHARS = 60
SHOWN_GONE = 5
SHOWN_STARTING = 10
LEFT_COLUMNS = {
    "LEFT": "left",
    "INSTANCE": "instance_id",
    "ENGINE": "engine",
    "HOST": "host",
    "PID": "pid",
    "BACK": "back",
    "WHY": "why",
}
SHOWN_BEHIND = 5
"""The number of workers that `state` lists for the update that runs. It lists the workers that are furthest behind."""
AGAINST = {
    "trainer": "the trainer's values",
    "reference": "the values that this version had before",
    "fleet": "the other workers' values",
}
"""The words for the values that the numeric canary is compared with."""
DIGEST_DIGITS = 12
KEY_CHARS = 4
"""The characters of a public key that are shown of each end."""

DONE = {
    "pause": "paused",
    "resume": "resumed",
    "enable": "enabled",
    "disable": "disabled",
}


def show(op: str, reply: Reply, body: Reply) -> str:
    """The reply of an op as text."""
    if op == "state":
        return "\n".join([*_heads(reply), *_running(reply), *_rows(reply, STATE_COLUMNS), *absent(reply)])
    if op == "workers":
        return "\n".join(
            [*_heads(reply), *_rows(reply, WORKER_COLUMNS), *_nodes(reply), *_starting(reply), *_left(reply)]
        )
    if op == "updates":
        return "\n".join(_updates(reply))
    if op == "new_run":
        return "\n".join(_updated(reply, "began a new run with"))
    if op in ("update_weights", "rollback", "complete_weights_update"):
        return "\n".join(_updated(reply))
    if op == "abort_weights_update":
        return f"aborted the update {reply['update_id']} in {_seconds(reply.get('elapsed_s'))}"
    if op == "check_weights":
        return "\n".join(_checked(reply))
    words = f"{DONE[op]} {_count(reply)} in {_seconds(reply.get('elapsed_s'))}"
    if op == "pause":
        words += f" ({body['mode']}); the fleet resumes by itself in {body['lease_s']:g} s"
    return words


def _heads(reply: Reply) -> list[str]:
    components: Mapping[str, Reply] = reply.get("components") or {"": reply}
    lines = []
    for name, head in components.items():
        words = [f"{name}:"] if name else []
        if "ready" in head:
            words += ["ready," if head["ready"] else "not ready,", f"{head.get('pause_state')},"]
        if head.get("expected"):
            there = sum(row.get("component", name) == name for row in reply["workers"])
            words.append(f"{there} of {head['expected']} workers,")
        if head.get("version"):
            words.append(f"version {version_words(head['version'], digest=True)},")
        words.append(f"epoch {head.get('epoch')}, fingerprint {head.get('fingerprint')}")
        lines.append(one_line(" ".join(words)))
    return lines


def _departed(reply: Reply) -> list[Reply]:
    components: Mapping[str, Reply] = reply.get("components") or {"": reply}
    return [one for head in components.values() for one in head.get("left") or ()]


def _gone(reply: Reply) -> list[str]:
    """One line for each worker that has left and is not back: the newest ones."""
    gone = [one for one in _departed(reply) if not one["back"]]
    lines = [
        one_line(f"{one['instance_id']} left {_ago(one['ago_s'])}: {left_words(one)}") for one in gone[:SHOWN_GONE]
    ]
    if len(gone) > SHOWN_GONE:
        lines.append(f"{len(gone) - SHOWN_GONE} more have left in the last hour: rl-plane workers")
    return lines


def absent(reply: Reply) -> list[str]:
    """Returns lines for the workers that start and the workers that have left. `state` shows them, also beside the
    error of an empty fleet."""
    return [*_starting(reply), *_gone(reply)]


def _starting(reply: Reply) -> list[str]:
    """Returns one line for each worker that loads its engine. It shows the SHOWN_STARTING slowest workers, and counts
    the others."""
    components: Mapping[str, Reply] = reply.get("components") or {"": reply}
    found = [one for head in components.values() for one in head.get("starting") or ()]
    found.sort(key=lambda one: -one["elapsed_s"])
    lines = [one_line(starting_words(one)) for one in found[:SHOWN_STARTING]]
    if len(found) > SHOWN_STARTING:
        lines.append(f"{len(found) - SHOWN_STARTING} more workers start")
    return lines


def starting_words(one: Reply) -> str:
    since = clock(one["since"])
    return (
        f"{one['instance_id']} starts since {since}: {one['engine']} on {one['host']}, pid {one['pid']}: "
        f"{one['phase']}, {one['in_phase_s']:.0f} of {one['elapsed_s']:.0f} s"
    )


def _left(reply: Reply) -> list[str]:
    """The workers that have left in the last hour."""
    rows = [
        {**one, "left": _ago(one["ago_s"]), "back": "yes" if one["back"] else "no", "why": left_words(one)}
        for one in _departed(reply)
    ]
    return ["", table(rows, LEFT_COLUMNS)] if rows else []


def left_words(one: Reply) -> str:
    """Why a worker has left, with its exit code if a supervisor has told it."""
    code = one.get("exit_code")
    return str(one["why"]) if code is None else f"{exit_words(code)}: {one['why']}"


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def _running(reply: Reply) -> list[str]:
    """Returns lines for the update that runs: how far it is, what it waits for, and which process asked for it."""
    components: Mapping[str, Reply] = reply.get("components") or {"": reply}
    lines = []
    for name, head in components.items():
        if (update := head.get("update")) is None:
            continue
        prefix = f"{name}: " if name else ""
        lines.append(one_line(f"{prefix}update {update['update_id']} ({update['label']}): {_phase_words(update)}"))
        lines.append("  " + one_line(f"waits for {update['waits_for']}"))
        if update["total_bytes"]:
            lines.append("  " + one_line(_received_words(update)))
        key = f" with the key {update['asked_by']}" if update["asked_by"] else ""
        via = f" by {update['transport']}" if update["transport"] else ""
        words = f"asked by {update['caller'] or update['who']}{key}{via}; {update['who']} coordinates it"
        lines.append("  " + one_line(words))
        lines += _of_workers(reply, update)
        if update["phase"] in (*BEFORE_DECISION, "prepared"):
            lines.append("  " + one_line(f"to end it: rl-plane abort {update['update_id']}"))
    return lines


def _phase_words(update: Reply) -> str:
    words = f"{update['phase']}, {update['elapsed_s']:.1f} s so far"
    if update["in_phase_s"] is not None:
        words += f", {update['in_phase_s']:.1f} s in this phase"
    if (left_s := update["deadline_in_s"]) is not None:
        words += f", {left_s:.0f} s left" if left_s >= 0 else f", {-left_s:.0f} s late"
    if update["idle_limit_s"] is not None:
        words += f", dropped after {update['idle_limit_s']:.0f} s without a call of its trainer"
    return words


def _received_words(update: Reply) -> str:
    done, total = update["bytes"], update["total_bytes"]
    rate = f", {update['bytes_per_s'] / 1e6:,.1f} MB/s" if update["bytes_per_s"] else ""
    return f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB ({done / total:.0%}) on {counted(update['workers'])}{rate}"


def _of_workers(reply: Reply, update: Reply) -> list[str]:
    """One line for each of the workers that are furthest behind."""
    mine = [
        (row["instance_id"], one)
        for row in reply["workers"]
        if (one := row.get("update")) and one["update_id"] == update["update_id"]
    ]
    mine.sort(key=lambda pair: pair[1]["bytes"] / (pair[1]["total_bytes"] or 1))
    lines = []
    for instance_id, one in mine[:SHOWN_BEHIND]:
        total = f" of {one['total_bytes'] / 1e6:,.1f}" if one["total_bytes"] else ""
        words = f"{instance_id}: {one['bytes'] / 1e6:,.1f}{total} MB, waits for {one['waits_for']}, "
        lines.append("    " + one_line(words + f"last bytes {one['since_progress_s']:.0f} s ago"))
    if len(mine) > SHOWN_BEHIND:
        lines.append(f"    and {len(mine) - SHOWN_BEHIND} more workers, which have more of it")
    return lines


def _rows(reply: Reply, columns: Mapping[str, str]) -> list[str]:
    rows = reply["workers"]
    if not rows:
        return ["no workers"]
    if any("component" in row for row in rows) and "components" in reply:
        columns = {"COMPONENT": "component", **columns}
    lines = [table([_flat(row) for row in rows], columns)]
    lines += [
        one_line(f"{row['instance_id']}: {row['error'].get('code')}: {row['error'].get('message')}")
        for row in rows
        if row.get("error")
    ]
    lines += [
        one_line(f"{row['instance_id']}: skipped: {row.get('reason')}")
        for row in rows
        if row.get("status") == "skipped"
    ]
    return lines


def _nodes(reply: Reply) -> list[str]:
    """The nodes of the workers whose engines span several hosts."""
    rows = [
        {**node, "instance_id": row["instance_id"], "ranks": ", ".join(map(str, node["ranks"]))}
        for row in reply["workers"]
        for node in row.get("nodes") or ()
    ]
    return [table(rows, NODE_COLUMNS)] if rows else []


def _flat(row: Reply) -> dict[str, Any]:
    shown = dict(row)
    if row.get("status") == "error":
        shown["ready"] = "no answer"
    elif row.get("status") == "skipped":
        shown["ready"] = "skipped"
    elif "ready" in row:
        shown["ready"] = "yes" if row["ready"] else "no"
    pause = row.get("pause")
    if isinstance(pause, Mapping):
        left = pause.get("lease_left_s")
        lease = f", {left:.0f} s left" if isinstance(left, (int, float)) else ""
        shown["pause"] = f"{pause.get('mode')}{lease}" if pause.get("paused") else "running"
    admission = row.get("admission")
    if isinstance(admission, Mapping):
        reasons = ", ".join(str(reason) for reason in admission.get("reasons") or ())
        shown["admission"] = "open" if admission.get("open") else f"closed: {reasons}"
    if isinstance(row.get("version"), Mapping):
        shown["version"] = version_words(row["version"])
    shown["canary"] = _canary_cell(row.get("canary"))
    return shown


def version_words(version: Any, digest: bool = False) -> str:
    """Returns a version's sequence and label, with `digest` also the first digits of its digest."""
    if not isinstance(version, Mapping):
        return str(version)
    words = f"{version.get('sequence')} ({version.get('label')})"
    prefix, colon, digits = str(version.get("digest")).rpartition(":")
    return f"{words} {prefix}{colon}{digits[:DIGEST_DIGITS]}" if digest else words


def _updated(reply: Reply, did: str = "committed") -> list[str]:
    components: Mapping[str, Reply] = reply.get("components") or {"": reply}
    lines = []
    for name, head in components.items():
        version = version_words(head.get("version"), digest=True)
        lines.append(one_line(f"{name + ': ' if name else ''}{did} version {version} on {_count(reply)}"))
        phases = head.get("phases") or {}
        spent = ", ".join(f"{key.removesuffix('_s')} {_seconds(value)}" for key, value in phases.items())
        lines.append(f"  in {_seconds(head.get('elapsed_s'))}" + (f": {spent}" if spent else ""))
        if head.get("canary"):
            lines.append("  " + one_line(f"canary: {_canary_words(head['canary'])}"))
        if head.get("excluded"):
            lines.append("  " + one_line(f"excluded, until healed: {', '.join(head['excluded'])}"))
    return lines


def _canary_words(canary: Reply) -> str:
    """Describes the numeric canary of one update, over all workers."""
    failed = canary.get("failed")
    words = f"{counted(canary['scored'])} scored" + (f", {failed} failed" if failed else "")
    if canary.get("difference") is None:
        words += ", no values to compare with" if not failed else ""
    else:
        against = AGAINST.get(canary["against"], canary["against"])
        difference, kl = f"{canary['difference']:.2g}", f"{canary['mismatch_kl']:.2g}"
        words += f", largest difference {difference}, mismatch_kl {kl} from {against}"
    return words + (f"; warning: {canary['warning']}" if canary.get("warning") else "")


def _canary_cell(canary: Any) -> str | None:
    """Describes the numeric canary of one update, or of one worker, for a cell of a table."""
    if not isinstance(canary, Mapping):
        return None
    if "scored" in canary:
        failed = f"{canary['failed']}/{canary['scored']} failed" if canary.get("failed") else ""
    else:
        failed = "" if canary["passed"] else f"failed: {canary.get('reason')}"
        if canary.get("warning"):
            failed = "failed, and served (warn)"
    if canary.get("difference") is None:
        return failed or "nothing to compare"
    numbers = f"{canary['difference']:.2g} {canary['against']}, kl {canary['mismatch_kl']:.2g}"
    return ", ".join(filter(None, (failed, numbers)))


def _updates(reply: Reply) -> list[str]:
    components: Mapping[str, Reply] = reply.get("components") or {"": reply}
    rows = [{"component": name, **_update(one)} for name, head in components.items() for one in head["updates"]]
    if not rows:
        return ["no updates"]
    columns = {"COMPONENT": "component", **UPDATE_COLUMNS} if "components" in reply else UPDATE_COLUMNS
    for heading, name in (("SOURCES", "sources"), ("ASKED BY", "asked_by")):
        if any(row[name] for row in rows):
            columns = {**columns, heading: name}
    return [table(rows, columns)]


def _sources_cell(sources: Mapping[str, Sequence[Reply]] | None) -> str:
    """The share of the bytes that came from workers, and the rate of the slowest worker. Empty: one source."""
    uses = [one for each in (sources or {}).values() for one in each]
    total = sum(one["bytes"] for one in uses)
    if not total:
        return ""
    trainer = sum(one["bytes"] for one in uses if one["source"].startswith(TRAINER))
    rates = [
        sum(one["bytes"] for one in each) / seconds
        for each in (sources or {}).values()
        if (seconds := max((one["seconds"] for one in each), default=0.0)) > 0
    ]
    slowest = f", {min(rates) / 1e6:,.0f} MB/s or more" if rates else ""
    return f"trainer {trainer / total:.0%}, workers {1 - trainer / total:.0%}{slowest}"


def _update(one: Reply) -> dict[str, Any]:
    began, ended = one.get("began_at"), one.get("ended_at")
    outcomes = [row.get("status") for row in (one.get("workers") or {}).values()]
    well, all_of_them = outcomes.count("ok"), len(outcomes)
    left_out = one.get("workers_left_out") or 0
    error = one.get("error") or {}
    why = f"{error.get('code')}: {error.get('message')}" if error else ""
    if not why and one.get("excluded"):
        why = f"excluded: {', '.join(one['excluded'])}"
    return {
        "began": datetime.fromtimestamp(began).strftime("%Y-%m-%d %H:%M:%S") if began else None,
        "outcome": one.get("outcome"),
        "version": (version_words(one["version"]) if one.get("version") else str(one.get("label"))) + _sent(one),
        "workers": f"{well + left_out}/{all_of_them + left_out}" if outcomes else None,
        "seconds": f"{ended - began:.3f}" if began and ended else None,
        "canary": _canary_cell(one.get("canary")),
        "sources": _sources_cell(one.get("sources")),
        "who": one.get("caller") or one.get("who"),
        "asked_by": re.sub(USER_KEY, _short_key, one.get("asked_by") or ""),
        "why": why[:WHY_CHARS] + "…" * (len(why) > WHY_CHARS),
    }


def _short_key(key: re.Match[str]) -> str:
    """The ends of a public key, by which `rl-plane keys list` shows whose it is."""
    return f"{key[0][:KEY_CHARS]}…{key[0][-KEY_CHARS:]}"


def _sent(one: Reply) -> str:
    """The form in which the weights came, unless all of them came in full."""
    encoding, sent, of = one.get("encoding"), one.get("sent_bytes"), one.get("model_bytes")
    if encoding in (None, "full"):
        return ""
    return f" by {encoding}" + (f" ({sent / of:.2g} of the bytes)" if sent is not None and of else "")


def _checked(reply: Reply) -> list[str]:
    rows = []
    for row in engine_replies(reply):
        for rank in row.get("ranks") or [{}]:
            match = {True: "equal", False: "differs"}.get(rank.get("match"), "")
            result = rank.get("checksum") or match or row.get("status")
            rows.append({"instance_id": row["instance_id"], "rank": rank.get("rank"), "result": result})
    lines = [table(rows, {"INSTANCE": "instance_id", "RANK": "rank", "RESULT": "result"})]
    for component, groups in _equal_weights(reply).items():
        where = f" of the component {component}" if component else ""
        if len(groups) > 1:
            apart = " | ".join(", ".join(names) for names in groups)
            lines.append(
                f"the weights of {len(groups)} groups of workers{where} differ: {apart}. Only workers of one engine "
                "with the same number of ranks can be compared; choose them with --workers."
            )
        elif len(groups[0]) > 1:
            lines.append(f"all workers{where} have equal weights")
    return lines


def weights_differ(reply: Reply) -> bool:
    """Reports whether a reply of `check_weights` shows workers with other weights than others of their component, or
    than their own snapshot."""
    ranks = [rank for row in engine_replies(reply) for rank in row.get("ranks") or ()]
    return any(len(groups) > 1 for groups in _equal_weights(reply).values()) or any(
        rank.get("match") is False for rank in ranks
    )


def _equal_weights(reply: Reply) -> dict[str, list[list[str]]]:
    """The instance ids of the workers with checksums, by component ("" where the rows name none). Workers of a
    component with the same checksums in the same ranks are one group."""
    found: dict[str, dict[tuple[tuple[Any, str], ...], list[str]]] = {}
    for row in engine_replies(reply):
        sums = tuple((rank.get("rank"), rank["checksum"]) for rank in row.get("ranks") or () if "checksum" in rank)
        if sums:
            groups = found.setdefault(row.get("component", ""), {})
            groups.setdefault(sums, []).append(row["instance_id"])
    return {component: list(groups.values()) for component, groups in found.items()}


def _count(reply: Reply) -> str:
    return counted(sum(row.get("status") == "ok" for row in reply["workers"]))


def _seconds(value: Any) -> str:
    return f"{value:.3f} s" if isinstance(value, (int, float)) else "? s"
