"""The generation service of one component in a frontend: its models, its limits and its counters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from frontend.completions.any_worker import ask_any
from frontend.completions.auto_tools import CallReader
from frontend.completions.caller_ids import CallerIds
from frontend.completions.model_choice import ComponentModels
from frontend.completions.plans import Plan
from frontend.completions.rollout_record import RolloutRecord
from frontend.completions.served_models import ServedModels, names_of
from frontend.completions.token_timings import TokenTimings
from frontend.frontend_limits import LIMITS, FrontendLimits
from frontend.routing.committed import Committed
from frontend.routing.engine_client import EngineClient
from frontend.routing.fleet_status import FleetStatus
from rl_plane.client import RlClient
from rl_plane.errors import FrontendEnding, NoWorkers, Overloaded, PlaneError, Unavailable
from rl_plane.membership.core import Changed, Snapshot
from rl_plane.membership.view import MembershipView
from rl_plane.protocol.record import DecisionRecord
from rl_plane.protocol.worker_ops import AbortedInFrontend


class Generation:
    """The state that all generation calls share. `GenerationCall` runs one call."""

    def __init__(
        self,
        engines: EngineClient,
        client: RlClient,
        view: MembershipView,
        status: FleetStatus,
        committed: Committed,
        wait_s: float,
        limits: FrontendLimits = LIMITS,
        *,
        is_own: bool = True,
    ) -> None:
        """`wait_s`: how long a call waits for a first worker. `is_own`: the component is the frontend's own, which
        answers requests without a `model`."""
        self.component = view.subjects.component
        self.is_own = is_own
        self.limits = limits
        self.engines = engines
        self.committed = committed
        self.outcomes: Counter[str] = Counter()
        """Calls that have ended, by `ok`, `disconnected` or the error's code."""
        self.timings = TokenTimings()
        self.on_record: Callable[[RolloutRecord], None] | None = None
        """Called with each choice after its end. None: nothing is recorded."""
        self.in_flight = 0
        """Choices under way."""
        self.caller_ids = CallerIds()
        self.engines.running.given = self.caller_ids.given_to
        self.call_reader = CallReader(client, view, status)
        self._is_leaving = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._client = client
        self._view = view
        self._status = status
        self._wait_s = wait_s
        self._created = int(time.time())
        self._known: tuple[Snapshot, DecisionRecord | None, ServedModels] | None = None
        """The models of these members and this record."""
        self._last_names: set[str] = set()
        """The names of the model of the worker that has joined last."""

    def start(self) -> None:
        self._view.listen(self._on_member)
        for member in self._view.snapshot():
            self._last_names = names_of(member)

    def _on_member(self, change: Changed) -> None:
        if change.after is not None:
            self._last_names = names_of(change.after)

    # ---- models ----

    def list_models(self) -> dict[str, Any]:
        return self.models.listed(self._created, self._view.record)

    def known_models(self) -> ComponentModels:
        """The names by which a request may choose this component."""
        models, is_there = self.models, len(self._view.snapshot()) > 0
        names = models.all_names if is_there else (*self._last_names, *models.adapters)
        return ComponentModels(self.component, names, is_there or bool(self._last_names))

    @property
    def models(self) -> ServedModels:
        """Computed once for each fleet: with many members it costs more than the rest of a request."""
        members, record = self._view.snapshot(), self._view.record
        if self._known is None or self._known[0] is not members or self._known[1] is not record:
            self._known = members, record, ServedModels.of(self.component, members.members, record)
        return self._known[2]

    async def check_model(self, asked: str | None) -> None:
        """Raises NotFound or NoWorkers."""
        with self._places(1):
            (await self.models_for(asked)).name_of(asked)

    async def ask_any_worker(self, asked: str | None, op: str, body: dict[str, Any]) -> dict[str, Any]:
        """Asks a worker that serves the model `asked`. Raises NotFound or NoWorkers."""
        await self.check_model(asked)
        return await ask_any(self._client, self._status, self._view.snapshot().members, op, body)

    async def models_for(self, asked: str | None) -> ServedModels:
        """The models, as new as a request for `asked` needs them. Waits for a first worker."""
        await self._view.wait_until(lambda now: len(now) > 0, self._wait_s)
        self.check_served()
        if not self.models.serves(asked):
            await self.committed.try_read()  # an adapter may have been loaded just now
        return self.models

    def abort(self, names: list[str] | None, waiting: bool) -> AbortedInFrontend:
        """Aborts the choices of these ids or callers' names, or all (None), as far as they wait here for a worker. Not
        `waiting`: aborts none, and only says which ids the names mean."""
        made = self.caller_ids.made_of(names or ())
        ids = None if names is None else {*names, *(one for several in made.values() for one in several)}
        return AbortedInFrontend(aborted=self.engines.aborts.abort(ids) if waiting else 0, made=made)

    # ---- limits ----

    def check_served(self) -> None:
        if not len(self._view.snapshot()):
            raise NoWorkers(
                f"no worker of {self.component} is there",
                fix=f"start one: {self._view.subjects.start_worker}",
                retry_after_s=1.0,
            )

    def check_stays(self) -> None:
        if self._is_leaving:
            raise Unavailable("this frontend is shutting down", fix="ask another one", retry_after_s=1.0)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new calls and waits for those under way. After the time-out it ends them with an error that carries
        their tokens so far."""
        self._is_leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                return
        # No worker has failed, so another worker must not try the choice again.
        self.engines.give_up(
            lambda: FrontendEnding(
                f"this frontend was told to end, and {timeout_s:g} s later this was still under way",
                fix="continue at another frontend; error.partial has the tokens so far",
                retry_after_s=1.0,
            )
        )

    @contextmanager
    def _places(self, count: int) -> Iterator[None]:
        self.check_stays()
        if self.in_flight + count > self.limits.choices:
            raise Overloaded(
                f"{self.in_flight} choices of {self.component} are under way in this frontend", retry_after_s=1.0
            )
        self.in_flight += count
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= count
            if not self.in_flight:
                self._idle.set()

    @asynccontextmanager
    async def counted(self, plan: Plan, on_end: Callable[[str], None]) -> AsyncIterator[None]:
        """Surrounds one call: occupies a place for each choice, and counts the outcome. `on_end` gets the outcome."""
        outcome = "disconnected"
        named = [name for name in (plan.id, plan.caller_id) if name]
        try:
            with self._places(len(plan.requests)), self.caller_ids.under(named, plan.made_id):
                yield
            outcome = "ok"
        except PlaneError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            self.outcomes[outcome] += 1
            on_end(outcome)
