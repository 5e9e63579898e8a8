"""A pause of SGLang's pipeline, on the scheduler's thread of every rank.

SGLang's own loop of a pipeline goes on while the engine is paused: it would make tokens while weights change. It also
holds several batches, of which SGLang's own pause retracts the present one only.

In each pass of the loop a stage takes the next batch (`mbs`), and hands its step on to the next stage. Every stage gets
a message of the adapter at the begin of the same pass, so all stages do the same.
"""

from __future__ import annotations

from typing import Any


def is_pipeline() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().pp_size > 1)


def choose_next_batch(choose: Any, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """Wraps the scheduler's choice of the next batch. A paused pipeline begins no step, and ends those under way."""
    if not (scheduler._engine_paused and is_pipeline()):
        return choose(scheduler, running_batch=running_batch, last_batch=last_batch)
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def stands_still(scheduler: Any) -> bool:
    """Reports whether the engine is paused, and its pipeline has no step under way."""
    return bool(scheduler._engine_paused) and (not is_pipeline() or all(one is None for one in scheduler.mbs))


def pause_all_batches(pause: Any, scheduler: Any, request: Any) -> None:
    """Wraps the scheduler's pause. Where it retracts requests, it retracts those of all batches: the adapter waits
    before until the pipeline stands still."""
    if request.mode == "retract" and is_pipeline():
        _gather(scheduler)
    pause(scheduler, request)


def idle_while_paused(on_idle: Any, scheduler: Any) -> None:
    """Wraps what an idle scheduler does. SGLang takes a paused pipeline for idle, and the KV of its requests for a
    leak, at which it ends."""
    if scheduler._engine_paused and is_pipeline():
        scheduler._record_scheduler_state_for_paused_engine()  # the hook after it waits for the next message
    else:
        on_idle(scheduler)


def _gather(scheduler: Any) -> None:
    """Moves the requests of all batches into the present one."""
    # The adapter waits for it (`_await_steps`), and resumes nothing while it changes weights.
    assert stands_still(scheduler), "a step under way would write into memory that is given back"
    batches = [*scheduler.running_mbs, *(one for one in scheduler.last_mbs if one is not None)]
    requests = {id(one): one for batch in batches for one in batch.reqs}
    for batch in scheduler.running_mbs:
        batch.reqs, batch.batch_is_full = [], False
    scheduler.running_batch.reqs = list(requests.values())
    scheduler.last_batch = None
    scheduler.last_mbs[:] = [None] * len(scheduler.last_mbs)


def with_waiting_batches(found: list[Any], scheduler: Any) -> list[Any]:
    """A hook after SGLang collects its batches, to abort or label their requests: adds those whose first step has
    ended. While the pipeline is paused, they are in no other list."""
    return [*found, *scheduler.last_mbs] if is_pipeline() else found
