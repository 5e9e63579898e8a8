"""One call of a pooling route: the vectors of its inputs, all of one version of the weights."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import replace

from frontend.completions.call import Arrival, ChunkMaker, GenerationCall, ReplyFormat
from frontend.completions.service import Generation
from frontend.pooling.pooling_plans import PooledPlan
from frontend.routing.committed import key_of_span
from frontend.routing.demands import Demands, point_of_span
from rl_plane.errors import Unavailable, Unlabelled
from rl_plane.protocol.generation import GenerateRequest

MAX_ROUNDS = 8
"""The most rounds in which a call computes inputs again, because a later version computed its other inputs. Each round
needs an update of the fleet during the call."""


class PooledCall(GenerationCall):
    """Runs the requests of one plan, by `whole`. Each input may go to another worker. If an update of the weights comes
    in the middle, the inputs that the older weights computed are computed again."""

    def __init__(self, service: Generation, pooled: PooledPlan) -> None:
        super().__init__(service, pooled.plan, ReplyFormat(pooled.write, _no_chunks))
        self._again: dict[int, tuple[GenerateRequest, Demands]] = {}
        """Index → what is asked for in place of the plan's request."""

    async def _events(self) -> AsyncGenerator[tuple[int, Arrival], None]:
        events = super()._events()
        for turn in range(1, MAX_ROUNDS + 2):
            async with aclosing(events) as arrivals:
                async for index, event in arrivals:
                    yield index, event
            self._check_whole()
            older = self._older(turn)
            if not older:
                return
            events = self._merged_events(older)  # runs nothing yet
        raise Unavailable(
            f"the weights changed {MAX_ROUNDS} times in this call",
            fix="send it again, with fewer inputs",
            retry_after_s=1.0,
        )

    def _request_of(self, index: int) -> tuple[GenerateRequest, Demands]:
        return self._again.get(index) or super()._request_of(index)

    def _check_whole(self) -> None:
        """Raises an error unless each input has a vector, and a version."""
        for choice in self._choices:
            if choice.pooled is None:
                raise Unavailable(
                    "the request was aborted before it was computed", fix="send it again", retry_after_s=1.0
                )
            if len(choice.spans) != 1 or point_of_span(choice.spans[0]) is None:
                raise Unlabelled("the worker does not say which weights computed the vector", retry_after_s=1.0)

    def _older(self, turn: int) -> Collection[int]:
        """The inputs that other weights than the latest have computed, and asks for them again. Weights of another run
        are older than any of the committed run."""
        spans = {choice.index: choice.spans[0] for choice in self._choices}
        if len({key_of_span(span) for span in spans.values()}) == 1:
            return ()
        record = self._service.committed.record
        run = record.version.run if record is not None else None
        latest = max((span for span in spans.values()), key=lambda span: (span.run == run, span.sequence or 0))
        older = [index for index, span in spans.items() if key_of_span(span) != key_of_span(latest)]
        plan, count = self._plan, len(self._choices)
        for index in older:
            request = plan.requests[index].model_copy(update={"id": f"{plan.made_id}-{index + turn * count}"})
            self._again[index] = request, replace(plan.demands, min_version=latest.sequence)
        return older

    def _record(self, outcome: str) -> None:
        """Does nothing: the record of rollouts has tokens only."""


def _no_chunks(*_: object) -> ChunkMaker:
    raise AssertionError("a vector is no stream")
