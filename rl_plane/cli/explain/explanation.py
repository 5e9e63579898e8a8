"""Explains one thing of a fleet: which thing an id means, how it is, what it waits for, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl_plane.cli.explain import timeline
from rl_plane.cli.explain.finding import Finding
from rl_plane.cli.explain.findings import findings
from rl_plane.cli.explain.known_facts import KnownFacts, Row
from rl_plane.cli.explain.update_findings import of_ended_update
from rl_plane.cli.explain.wording import in_brackets, seconds
from rl_plane.cli.explain.worker_findings import of_departed, of_request, of_starting, of_worker
from rl_plane.cli.output import one_line
from rl_plane.errors import InvalidRequest, NotFound
from rl_plane.protocol.generation import names_of

SHOWN_MATCHES = 5
"""The ids that an ambiguous prefix lists."""
SHOWN_FINDINGS = 20
"""The findings that the fleet's explanation lists: what fits on a screen."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `rl-plane explain`."""

    kind: str
    """`fleet`, `worker`, `update` or `request`."""
    id: str
    """Empty: the fleet."""
    now: str
    """Its state, in one sentence."""
    facts: Sequence[str]
    """More about it, a line each."""
    findings: Sequence[Finding]
    """Everything that is not as it should be, the most general cause first. Empty: all is well."""
    past: Sequence[str]
    """Its past, oldest first."""
    missing: Sequence[str]
    """The parts that could not be read, and why."""

    def lines(self) -> list[str]:
        """The text for a person: the cause and the fix first."""
        lines = [one_line(self.now)]
        for one in self.findings[:SHOWN_FINDINGS]:
            lines.append(one_line(f"{one.name} {one.cause}"))
            waits_for = one.waits_for if one.waits_for not in one.cause else ""
            parts = {"waits for": waits_for, "ends": one.until, "do": one.fix}
            lines += [f"  {name:<9} {one_line(words)}" for name, words in parts.items() if words]
        if len(self.findings) > SHOWN_FINDINGS:
            lines.append(f"{len(self.findings) - SHOWN_FINDINGS} more of these: --json")
        lines += ["  " + one_line(fact) for fact in self.facts]
        if self.past:
            lines += ["", *(f"  {line}" for line in self.past)]
        return lines + [one_line(f"not known: {line}") for line in self.missing]


def explain(facts: KnownFacts, given: str | None) -> Explanation:
    """Explains the thing that `given` names, or the fleet.

    Raises:
        NotFound: nothing has such an id.
        InvalidRequest: several things have ids that begin so.
    """
    if given is None:
        return explain_fleet(facts)
    kind, found = identify(facts, given)
    return {"worker": explain_worker, "update": explain_update, "request": explain_request}[kind](facts, found)


# ---- which thing is meant ----


def identify(facts: KnownFacts, given: str) -> tuple[str, str]:
    """The kind and the whole id of what `given` names: an id, the beginning of one, or an update's label."""
    ids = dict.fromkeys(_ids(facts))
    if exact := [one for one in ids if one[1] == given]:
        return exact[0]
    # the newest update of a label is meant
    for update in [facts.update, *facts.updates]:
        if update is not None and update["label"] == given and update["update_id"]:
            return "update", str(update["update_id"])
    # a caller's own name of one or several requests
    named = {("request", names_of(str(row["id"]))[-1]) for row in facts.requests if given in row["names"]}
    begins = sorted(named) or [one for one in ids if given and one[1].startswith(given)]
    if len(begins) == 1:
        return begins[0]
    if begins and len(whole := {(kind, names_of(one)[-1]) for kind, one in begins}) == 1:
        kind, reply = whole.pop()
        if kind == "request":  # its choices
            return kind, reply
    if begins:
        listed = ", ".join(f"{kind} {one}" for kind, one in begins[:SHOWN_MATCHES])
        more = f" and {len(begins) - SHOWN_MATCHES} more" if len(begins) > SHOWN_MATCHES else ""
        raise InvalidRequest(
            f"{given!r} may mean {listed}{more}", field="ID", fix="give more characters of the id that you mean"
        )
    gap = f" (not read: {', '.join(facts.missing)})" if facts.missing else ""
    raise NotFound(
        f"{facts.asked} knows no worker, update or request {given!r}; searched: {len(facts.workers)} workers, "
        f"{len(facts.left)} that left, {len(facts.updates)} updates, the running requests and the given "
        f"records{gap}",
        fix="take a worker's id from `rl-plane workers`, an update's id or label from `rl-plane updates --json`, a "
        "request's id from its reply or GET /v1/rl/requests. An ended request is only in records: --records DIR. "
        "One of another component: --component NAME",
    )


def _ids(facts: KnownFacts) -> Iterator[tuple[str, str]]:
    yield from (("worker", str(row["instance_id"])) for row in facts.rows)
    yield from (("worker", instance_id) for instance_id in facts.workers)
    yield from (("worker", str(one["instance_id"])) for one in (*facts.starting, *facts.left))
    if facts.update is not None:
        yield "update", str(facts.update["update_id"])
    yield from (("update", str(entry["update_id"])) for entry in facts.updates if entry["update_id"])
    yield from (("request", str(row["id"])) for row in facts.requests)
    yield from (("request", str(row["id"])) for row in facts.records)
    for kind, data in facts.events:  # a worker that left before this frontend counted, for example
        if kind in ("member", "admission"):
            yield "worker", str(data["instance_id"])


# ---- the explanations ----


def explain_fleet(facts: KnownFacts) -> Explanation:
    found = findings(facts)
    state, rows = facts.state, facts.rows
    if state is None:
        return _made(facts, "fleet", "", f"{facts.asked} can't say how the fleet is", [], found, [])
    serving = sum(row.get("status") == "ok" and bool(row["ready"]) for row in rows)
    version = state.get("version")
    there = max(len(rows), facts.expected())
    words = (
        f"{'ready' if state['ready'] else 'not ready'}, {state['pause_state']}, {serving} of {there} workers serve"
    )
    words += f" version {version['sequence']} ({version['label']})" if version else ", and no version is committed"
    words += "; nothing is wrong" if not found else ""
    return _made(facts, "fleet", "", words, [], found, [])


def explain_worker(facts: KnownFacts, instance_id: str) -> Explanation:
    past = timeline.of_worker(facts, instance_id)
    row = next((one for one in facts.rows if one["instance_id"] == instance_id), None)
    where = in_brackets(facts.place(instance_id))
    if row is None:
        gone = next((one for one in facts.left if one["instance_id"] == instance_id), None)
        found = [of_departed(facts, gone)] if gone is not None and not gone["back"] else []
        found += [of_starting(facts, one) for one in facts.starting if one["instance_id"] == instance_id]
        return _made(
            facts, "worker", instance_id, f"worker {instance_id}{where} is not in the fleet", [], found, past
        )
    found = of_worker(facts, row)
    if row.get("status") != "ok":
        words = "does not answer" if row.get("status") == "error" else f"is skipped: {row.get('reason')}"
        return _made(facts, "worker", instance_id, f"worker {instance_id}{where} {words}", [], found, past)
    words = f"{'open' if row['admission']['open'] else 'closed'} since {seconds(row['in_state_s'])}"
    version = row.get("version")
    words += f", version {version['sequence']} ({version['label']})" if version else ", no committed version"
    words += f", {row['running']} requests run, {row['waiting']} wait"
    if row["pause"]["paused"]:
        left = float(row["pause"].get("lease_left_s") or 0.0)
        words += f"; paused, and resumes by itself in {seconds(left)}"
    lines = []
    if (own := row.get("update")) is not None:
        total = f" of {own['total_bytes'] / 1e6:,.1f}" if own["total_bytes"] else ""
        lines.append(
            f"receives update {own['update_id']} ({own['label']}): {own['bytes'] / 1e6:,.1f}{total} MB, waits for "
            f"{own['waits_for']}, last bytes {seconds(own['since_progress_s'])} ago"
        )
    kinds = ("nats", "pause", "lock", *(["update"] if own is not None and facts.update is not None else []))
    found += [one for one in findings(facts) if one.kind in kinds]
    return _made(facts, "worker", instance_id, f"worker {instance_id}{where} is {words}", lines, found, past)


def explain_update(facts: KnownFacts, update_id: str) -> Explanation:
    entry = next((one for one in facts.updates if one["update_id"] == update_id), None)
    past = timeline.of_update(facts, update_id, entry)
    running = facts.update
    if running is not None and running["update_id"] == update_id:
        words = f"update {update_id} ({running['label']}) runs since {seconds(running['elapsed_s'])}, phase "
        words += running["phase"]
        if running["in_phase_s"] is not None:
            words += f" since {seconds(running['in_phase_s'])}"
        lines = [f"asked by {running['caller'] or running['who']}; {running['who']} coordinates it"]
        if running["total_bytes"]:
            lines.append(
                f"{running['bytes'] / 1e6:,.1f} of {running['total_bytes'] / 1e6:,.1f} MB have come to "
                f"{running['workers']} workers"
            )
        found = [one for one in findings(facts) if one.kind in ("nats", "update", "lock")]
        found += [one for row in facts.rows for one in of_worker(facts, row) if row.get("status") == "error"]
        return _made(facts, "update", update_id, words, lines, found, past)
    assert entry is not None, "identify has found it"
    label = f"update {update_id} ({entry['label']})"
    version = entry.get("version")
    words = f"{label} is {entry['outcome']}" + (f" as sequence {version['sequence']}" if version else "")
    if entry.get("ended_at") and entry.get("began_at"):
        ago = seconds(max(0.0, facts.now - entry["ended_at"]))
        words += f": it took {entry['ended_at'] - entry['began_at']:.1f} s, and ended {ago} ago"
    ended = of_ended_update(facts, entry)
    lines = [f"asked by {entry.get('caller') or entry.get('who') or 'an earlier process'}"]
    return _made(facts, "update", update_id, words, lines, [ended] if ended is not None else [], past)


def explain_request(facts: KnownFacts, request_id: str) -> Explanation:
    rows = _choices(facts.requests, request_id)
    if not rows:
        return _recorded(facts, request_id)
    found = [one for row in rows for one in of_request(row, always=True)]
    words = f"request {request_id} runs since {seconds(max(row['elapsed_s'] for row in rows))}"
    workers = {row["worker"] for row in rows}
    mine = [one for one in facts.rows if one["instance_id"] in workers]
    found += [one for each in mine for one in of_worker(facts, each)]
    found += [one for one in findings(facts) if one.kind in ("nats", "pause")]
    lines = []
    for each in mine:
        if each.get("status") == "ok":
            name = each["instance_id"]
            lines.append(f"worker {name} has {each['running']} running and {each['waiting']} waiting requests")
    lines += _ends(_choices(facts.records, request_id))
    return _made(facts, "request", request_id, words, lines, found, [])


def _choices(rows: Sequence[Row], request_id: str) -> list[Row]:
    """The rows of one choice, or of all choices of a reply."""
    return [one for one in rows if request_id in names_of(str(one["id"]))]


def _recorded(facts: KnownFacts, request_id: str) -> Explanation:
    records = _choices(facts.records, request_id)
    one = records[-1]
    first = f", the first token after {one['first_token_s']:.2f} s" if one["first_token_s"] is not None else ""
    words = (
        f"request {request_id} has ended ({one['outcome']}, {one['finish_reason']}) after {one['seconds']:.2f} s"
    )
    return _made(facts, "request", request_id, words + first, _ends(records), [], [])


def _ends(records: Sequence[Row]) -> list[str]:
    return [f"choice {each['index']}: {len(each['token_ids'])} tokens by {_spans(each)}" for each in records]


def _spans(record: Row) -> str:
    return ", ".join(str(span["version"]) for span in record["weight_versions"]) or "no version"


def _made(
    facts: KnownFacts,
    kind: str,
    id: str,
    now: str,
    lines: Sequence[str],
    found: Sequence[Finding],
    past: list[timeline.Line],
) -> Explanation:
    missing = [f"{part} ({error['message']})" for part, error in facts.missing.items()]
    return Explanation(kind, id, now, lines, list(dict.fromkeys(found)), timeline.shown(past), missing)
