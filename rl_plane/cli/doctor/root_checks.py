"""Compares what each worker sees of a weight root. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rl_plane.cli.doctor.check_line import CheckLine, error, ok, size, warning
from rl_plane.cli.doctor.doctor_facts import DoctorFacts, Row
from rl_plane.cli.output import ids

VERSIONS = 2
"""A root should have room for so many further versions: the trainer writes one while the workers read another."""

Seen = tuple[Row, Row]
"""The worker's row of `describe`, and its view of the root."""


def root_checks(facts: DoctorFacts) -> Iterator[CheckLine]:
    """A root that the operator names must be one directory for all workers. Of the other roots, which may well be
    local disks, only a difference on one host is more than a warning."""
    seen: dict[str, list[Seen]] = defaultdict(list)
    for row in facts.rows:
        for root in row["host"]["roots"]:
            seen[root["path"]].append((row, root))
    for path, views in sorted(seen.items()):
        named = path in facts.roots
        bad = error if named else warning
        yield from _unreadable(path, views, named)
        good = [(row, root) for row, root in views if root["error"] is None]
        without = [row["instance_id"] for row in facts.rows if row not in [each for each, _ in views]]
        if without:
            yield bad("weight root", f"{path} is no root of {ids(without)}", "start them with --weight-root too")
        if good:
            yield _same(path, good, bool(named))
            yield _room(path, good, bool(named))
    if not seen and facts.rows:
        yield ok("weight root", "no worker has one: weights come by another transport than filesystem")


def _unreadable(path: str, views: list[Seen], named: bool) -> Iterator[CheckLine]:
    why: dict[str, list[str]] = defaultdict(list)
    for row, root in views:
        if root["error"] is not None:
            why[str(root["error"])].append(row["instance_id"])
    for reason, workers in sorted(why.items()):
        fix = "mount it there under the same path, readable for the worker's user"
        if "does not answer" in reason:
            fix = "see whether the file server runs (`mount`, `dmesg`): each read of it hangs"
        elif "outside the weight roots" in reason:
            fix = "start the worker with --weight-root above it"
        make = error if named or "does not answer" in reason else warning
        yield make("weight root", f"{path} is not readable by {ids(workers)}: {reason}", fix)


def _same(path: str, views: list[Seen], named: bool) -> CheckLine:
    if len(views) == 1:
        return ok("weight root", f"{path} is read by one worker ({_entries(views[0][1])})")
    bad = error if named else warning
    fix = "mount the same share there; else an update by filesystem fails, or reads other files"
    hosts: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for row, root in views:
        hosts[row["host"]["host"]].add((root["device"], root["inode"]))
    split = sorted(host for host, places in hosts.items() if len(places) > 1)
    if split:
        return bad("weight root", f"{path} is not one directory for the workers on {ids(split)}", fix)
    listings: dict[str, list[str]] = defaultdict(list)
    for row, root in views:
        listings[f"{root['digest']} ({_entries(root)})"].append(f"{row['instance_id']} on {row['host']['host']}")
    if len(listings) > 1:
        listed = "; ".join(f"{what}: {ids(who)}" for what, who in sorted(listings.items()))
        return bad("weight root", f"{path} has other names in it on some workers: {listed}", fix)
    if len({root["inode"] for _, root in views}) > 1:
        words = f"{path} has the same names on all workers, but other inodes: it may be a copy on each host"
        return warning("weight root", words, "make sure that it is one share: compare a new file on two hosts")
    return ok(
        "weight root", f"{path} is the same directory for all {len(views)} workers ({_entries(views[0][1])})"
    )


def _entries(root: Row) -> str:
    count = int(root["entries"])
    return "more than 10,000 names" if root["digest"] is None else f"{count} name{'' if count == 1 else 's'}"


def _room(path: str, views: list[Seen], named: bool) -> CheckLine:
    free = min(int(root["free_bytes"]) for _, root in views)
    model = max(int(row["weight_bytes"]) for row, _ in views)
    words = f"{path}: {size(free)} are free, a version takes {size(model)}"
    if free < model:
        make = error if named else warning
        return make("disk", words, "remove old versions there: the next one does not fit")
    if free < VERSIONS * model:
        return warning("disk", words, "remove old versions there soon")
    return ok("disk", words)
