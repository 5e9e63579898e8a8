"""The findings of a soak, on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.soak.checker import Fault
from tests.soak.fleet import Counts

DESCRIPTORS_GROWTH = 24
"""The most descriptors that one process may gain from before the load to after it: kept HTTP connections, and a pool's
threads."""
TASKS_GROWTH = 12
"""The most tasks that one process may gain: a task for each connection, and some that are under way by chance."""
THREADS_GROWTH = 24
"""The most threads that one process may gain: the default pool grows to some 32 threads, and stays."""
MAX_FAULTS = 12
"""The number of faults that are printed. The first faults say most."""


@dataclass(slots=True)
class Report:
    seed: int
    seconds: float
    engines: Sequence[str]
    faults: list[Fault] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    """Requests that ended well, by kind."""
    routes: Counter[str] = field(default_factory=Counter)
    """Requests that ended well, by route."""
    trouble: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    choices: int = 0
    crossed: int = 0
    fragments: int = 0
    versions: int = 0
    whole_s: float = 0.0
    before: Mapping[str, Counts] = field(default_factory=dict)
    after: Mapping[str, Counts] = field(default_factory=dict)
    elapsed_s: float = 0.0

    @property
    def good(self) -> bool:
        return not self.faults

    def text(self) -> str:
        requests = ", ".join(f"{count} {kind}" for kind, count in sorted(self.requests.items()))
        trouble = ", ".join(f"{count} {code}" for code, count in sorted(self.trouble.items()))
        routes = ", ".join(f"{count} {path}" for path, count in sorted(self.routes.items()))
        lines = [
            f"soak of {self.seconds:g} s, seed {self.seed} on {', '.join(self.engines)}",
            f"requests   {sum(self.requests.values())}: {requests}",
            f"routes     {routes}",
            f"checked    {self.tokens} tokens of {self.choices} choices; {self.crossed} choices of several versions, "
            f"{self.fragments} cut off before their labels",
            f"told       {trouble or 'nothing else'}",
            f"versions   {self.versions} committed; whole {self.whole_s:.1f} s after the last step; "
            f"{self.elapsed_s:.0f} s in all",
        ]
        lines += [f"{count:8d}   {name}" for name, count in sorted(self.steps.items())]
        lines += [f"{name:<18} {_growth(self.before.get(name), now)}" for name, now in sorted(self.after.items())]
        lines += [f"FAULT      {fault}" for fault in self.faults[:MAX_FAULTS]]
        if len(self.faults) > MAX_FAULTS:
            lines.append(f"           … and {len(self.faults) - MAX_FAULTS} more")
        engines = "".join(f" --engine {name}" for name in self.engines)
        again = f"python -m tests.soak --seconds {self.seconds:g} --seed {self.seed}{engines}"
        lines.append("no fault" if self.good else f"{len(self.faults)} faults; again: {again}")
        return "\n".join(lines)


def _growth(before: Counts | None, now: Counts) -> str:
    parts = []
    for name in ("descriptors", "tasks", "threads"):
        had = getattr(before, name) if before is not None else "?"
        parts.append(f"{had} → {getattr(now, name)} {name}")
    return ", ".join(parts)


def leaks(before: Mapping[str, Counts], after: Mapping[str, Counts]) -> list[Fault]:
    """Returns the processes that have gained more than the limits. A restarted process is compared with the one before
    it."""
    limits = {"descriptors": DESCRIPTORS_GROWTH, "tasks": TASKS_GROWTH, "threads": THREADS_GROWTH}
    faults = []
    for name, now in after.items():
        for what, limit in limits.items():
            had, has = getattr(before[name], what), getattr(now, what)
            if has > had + limit:
                faults.append(Fault("leak", "", name, "", f"{has} {what}, from {had}; {limit} more are allowed"))
    return faults
