"""Finds why an update does not end, or why it has failed. Pure."""

from __future__ import annotations

from rl_plane.cli.explain.finding import Finding
from rl_plane.cli.explain.known_facts import KnownFacts, Row
from rl_plane.cli.explain.wording import GONE, STOPPED, in_time, look_at, process_of, with_state, workers_named
from rl_plane.commit.running_update import BEFORE_DECISION, WAITS_FOR_TRAINER
from rl_plane.errors import CanaryFailed


def of_update(facts: KnownFacts, update: Row) -> Finding:
    """The finding of the update that runs."""
    name = f"{update['update_id']} ({update['label']})"
    before = update["phase"] in (*BEFORE_DECISION, "prepared")
    trainer = update["caller"] or update["who"]
    trainer_place = process_of(trainer)
    trainer_state = facts.process_at(trainer_place)
    lost = _lost_during(facts, update)
    waits_for, abort = str(update["waits_for"]), f"`rl-plane abort {update['update_id']}` ends it"
    if lost and trainer_state not in (STOPPED, GONE) and update["phase"] != "prepared":
        place = facts.place(lost[0])
        of_group = f", and with it waits for {waits_for}" if waits_for.startswith("the trainer's") else ""
        waits_for = f"{workers_named(lost)}, which {'does' if len(lost) == 1 else 'do'} not answer"
        cause, fix = (
            f"waits for {waits_for}{with_state('; its', facts.process_at(place))}{of_group}",
            look_at(place, "the worker", facts.process_at(place)),
        )
        if before:
            fix += f". {abort}; then publish again: the other workers serve the version before"
    elif waits_for.startswith("the trainer's") or waits_for == WAITS_FOR_TRAINER:
        cause = f"waits for {waits_for}; the trainer is {trainer}{with_state(', whose', trainer_state)}"
        fix = look_at(trainer_place, "the trainer", trainer_state) + f". {abort}"
        if update["phase"] == "prepared":
            fix += f", `rl-plane complete {update['update_id']}` commits it"
    elif before:
        cause, fix = f"waits for {waits_for}", f"nothing while bytes come; {abort}"
    else:
        cause = f"is decided (phase {update['phase']}), and waits for {waits_for}"
        fix = (
            "wait: it can't be aborted any more. A worker that does not answer leaves within 8 s, and heals later"
        )
    return Finding(name, "update", cause, fix, waits_for, _update_until(facts, update, before))


def _lost_during(facts: KnownFacts, update: Row) -> list[str]:
    """The workers that do not answer, or have left since the update began. A trainer that sends to a group stands still
    with them."""
    silent = [str(row["instance_id"]) for row in facts.rows if row.get("status") == "error"]
    began = update["began_at"] or facts.now
    return silent + [str(one["instance_id"]) for one in facts.left if not one["back"] and one["left_at"] >= began]


def _update_until(facts: KnownFacts, update: Row, before: bool) -> str:
    if (left_s := update["deadline_in_s"]) is not None:
        return in_time(left_s, facts.now) + (", then it is aborted" if before else "")
    if update["idle_limit_s"] is not None:
        return f"{update['idle_limit_s']:.0f} s after the trainer's last call, then it is aborted"
    return ""


def of_ended_update(facts: KnownFacts, entry: Row) -> Finding | None:
    """The finding of an update of the history. None: all is well with it."""
    error, excluded = entry.get("error") or {}, entry.get("excluded") or ()
    name = f"{entry['update_id']} ({entry['label']})"
    failed = [key for key, row in (entry.get("workers") or {}).items() if row.get("status") != "ok"]
    at = f" on {workers_named(failed)}" if failed else ""
    if entry["outcome"] == "aborted":
        cause = f"was aborted{at}, and nothing has changed: {error.get('message', 'no reason is known')}"
        return Finding(name, "update", cause, _error_fix(error))
    if error:
        cause = f"is committed{at}, with an error: {error.get('message')}"
        return Finding(name, "update", cause, _error_fix(error))
    behind = {
        row["instance_id"] for row in facts.rows if row.get("status") != "ok" or not row["admission"]["open"]
    }
    out = sorted(set(excluded) & behind)
    if out:
        cause = f"continued without {workers_named(out)}, which {'is' if len(out) == 1 else 'are'} not open yet"
        return Finding(name, "update", cause, f"they heal by themselves; else `rl-plane explain {out[0]}`")
    return None


def _error_fix(error: Row) -> str:
    if error.get("code") == CanaryFailed.code:
        return "the weights compute other numbers than they should: see docs/canary.md, and publish correct ones"
    return str(error.get("fix") or "see the log of its trainer and of the worker, then publish again")
