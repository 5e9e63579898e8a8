"""I3: whatever is served was made by committed weights, by an engine that computes them as it should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_plane.protocol.canary import CanaryRecord
from rl_plane.protocol.generation import VersionSpan
from rl_plane.protocol.record import LEASE_MARGIN_S, SERVING_LEASE_S
from rl_plane.protocol.versions import WeightVersion
from tests.sim import product
from worker.engines.fake.adapter import FakeEngine, fake_token

if TYPE_CHECKING:
    from tests.sim.checks import Checks
    from tests.sim.process import Process

OPEN_AFTER_S = SERVING_LEASE_S + LEASE_MARGIN_S
"""A decided version is served from its opening on, or so long after the decision."""
SLACK_S = 0.01
VOCABULARY = 512


def miscomputed(digest: str) -> str:
    """The name of the weights that an engine computes with if it miscomputes."""
    return f"other than {digest}"


class ServingChecks:
    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._world = checks.world
        self._delivered: dict[tuple[str, int], float] = {}
        """Run and sequence → when a client first had tokens of it."""

    def admitted(self, process: Process, engine: FakeEngine, adapter: str | None) -> None:
        """A worker lets a request into its engine."""
        checks, now = self._checks, self._checks.now
        held, wrong = product.in_engine(engine, adapter)
        if held is None:
            checks.fail("I3", f"{process.name} admits a request to {wrong}")
            return
        record = checks.record
        if checks.recovering() or record is None:
            return
        decided_at = checks.decided_at[record.key]
        if held == record.held:
            # A worker counts from its first news of the decision, which is later, by a clock of its own.
            slack_s = SLACK_S + OPEN_AFTER_S * self._world.clock_drift
            if record.key not in checks.opened_at and now < decided_at + OPEN_AFTER_S - slack_s:
                checks.fail("I3", f"{process.name} serves {record}, which is not open yet")
            return
        if held == checks.rolled_from.get(record.key):
            replaced_at = checks.final_at.get(record.key)
        else:
            earlier = next((one for one in reversed(checks.decided) if one.held == held), None)
            if earlier is None:
                checks.fail("I3", f"{process.name} serves {held}, which was never committed")
                return
            replaced_at = 0.0 if record.key in checks.opened_at else decided_at
            if record.key in checks.rolled_from:
                replaced_at = decided_at
        lease_s = SERVING_LEASE_S * (1.0 + self._world.clock_drift) + process.clock.stood_s
        if replaced_at is not None and now > replaced_at + (lease_s if replaced_at else 0.0) + SLACK_S:
            checks.fail("I3", f"{process.name} admits a request to {held.version.label}, and {record} is served")

    def completed(
        self,
        frontend: str,
        prompt: list[int],
        tokens: list[int],
        spans: Sequence[VersionSpan],
        start: float,
        seams: Sequence[int] = (0,),
    ) -> None:
        """Whatever a frontend delivers was made by committed weights, and says which. `seams`: where each of its
        workers began, with all before it as a prompt."""
        checks = self._checks
        if not spans or spans[0].start != 0 or spans[-1].end != len(tokens):
            checks.fail("I3", f"{len(tokens)} tokens came with the spans {spans}")
            return
        for span in spans:
            base, name, adapter = product.made_by(span)
            if not any(
                one.held.version == base and (name is None or one.held.adapters.get(name) == adapter)
                for one in checks.decided
            ):
                checks.fail(
                    "I3", f"{frontend} delivers tokens of {base} and {adapter}, which were never committed"
                )
            adapter_digest = adapter.digest if adapter is not None else None
            for position in range(span.start, span.end):
                seam = max(at for at in seams if at <= position)
                given = prompt + tokens[:seam]

                def made_with(digest: str) -> bool:
                    token = fake_token(digest, given, position - seam, VOCABULARY, adapter_digest)  # noqa: B023
                    return tokens[position] == token  # noqa: B023

                if made_with(base.digest):
                    continue
                wrong = made_with(miscomputed(base.digest))
                if wrong and self._may_miscompute(base, start):
                    continue
                how = "by an engine that miscomputes" if wrong else f"not by {span.version}"
                checks.fail("I3", f"{frontend}: token {position} of {span.version} was made {how}")
            if not checks.recovering(start):
                self._check_age(frontend, base, name, adapter, start)
            self._delivered.setdefault((base.run, base.sequence), checks.now)

    def _may_miscompute(self, base: WeightVersion, start: float) -> bool:
        """Could no process know then what this version computes? The trainer gave no values, or was overruled by
        `on_canary_failure: warn`, and at least half of the workers that scored it miscomputed; or its coordinator
        died, and each worker opened by itself, with nothing to be compared with."""
        told = self._checks.canaries.get((base.run, base.sequence), [])
        before = next((one for at, one in reversed(told) if at <= start), None)
        since = [one for at, one in told if at > start]  # the request may have waited until one of these
        return any(self._leaves_open(base, one) for one in (before, *since))

    @staticmethod
    def _leaves_open(base: WeightVersion, canary: CanaryRecord | None) -> bool:
        if canary is None:
            return True  # it was switched off
        if canary.expected is not None:
            return False
        truth = product.vectors_of(base.digest, canary.sequences)
        return not any(product.near(vectors, truth) for vectors in canary.references.values())

    def _check_age(
        self, frontend: str, base: WeightVersion, name: str | None, adapter: WeightVersion | None, start: float
    ) -> None:
        """The versions that were reported as committed, and the versions that were served, before a request began at
        `start`."""
        checks = self._checks
        for at, told in checks.told:
            if at >= start or told.run != base.run:
                continue
            newest = told.held.version
            of_adapter = told.held.adapters.get(name or "", None if name is None else told.made)
            if newest.sequence > base.sequence or (
                adapter is not None
                and of_adapter is not None
                and of_adapter.sequence > adapter.sequence
                and told.made.sequence > adapter.sequence
            ):
                checks.fail(
                    "I3",
                    f"{frontend} answers by {base.sequence}{f' and {adapter.sequence}' if adapter else ''}, asked "
                    f"{start - at:.3f} s after {told} was told",
                )
        rolling = {(key[0], key[1]) for key in checks.rolled_from}
        for (run, newer), at in self._delivered.items():
            if run == base.run and newer > base.sequence and at < start and (run, newer) not in rolling:
                checks.fail("I3", f"{frontend}: asked after {newer} was served, and answered by {base.sequence}")
