"""Pauses SGLang's pipeline. It runs on the scheduler's thread, in every rank.

SGLang's own loop of a pipeline continues while the engine is paused: it would make tokens while weights change. The
loop also has several batches, and SGLang's own pause retracts the requests of one of them.

The loop takes its batches in turn. In each pass a stage reads its messages, chooses the next step of one batch, runs it
and sends it to the next stage. Every stage reads a message of the adapter in the same pass, so all stages do the same.
The scheduler has three lists with one place for each batch:

- `running_mbs`: the requests that make tokens.
- `mbs`: the step that is under way. None: there is none.
- `last_mbs`: the step that has ended last. After the step of a prompt, the next choice moves the request to the running
  ones. While the pipeline is paused, such a request is in no other list.
"""

from __future__ import annotations

from typing import Any


def is_pipeline() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().pp_size > 1)


def choose_next_batch(choose: Any, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """Wraps the scheduler's choice of the next step. A paused pipeline chooses none. Its loop ends the steps that are
    under way."""
    if not (scheduler._engine_paused and is_pipeline()):
        return choose(scheduler, running_batch=running_batch, last_batch=last_batch)
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def stands_still(scheduler: Any) -> bool:
    """Reports whether the engine is paused, and its pipeline has no step under way."""
    return bool(scheduler._engine_paused) and (not is_pipeline() or all(one is None for one in scheduler.mbs))


def pause_all_batches(pause: Any, scheduler: Any, request: Any) -> None:
    """Wraps the scheduler's pause. A retraction takes the requests of all batches. The pipeline must stand still: the
    adapter has waited for that."""
    if request.mode == "retract" and is_pipeline():
        _gather(scheduler)
    pause(scheduler, request)


def idle_while_paused(on_idle: Any, scheduler: Any) -> None:
    """Wraps what an idle scheduler does. SGLang takes a paused pipeline for idle and the KV of its requests for a leak,
    and ends itself."""
    if scheduler._engine_paused and is_pipeline():
        scheduler._record_scheduler_state_for_paused_engine()  # the plugin's hook of it waits for a message
    else:
        on_idle(scheduler)


def _gather(scheduler: Any) -> None:
    """Moves the requests of all batches into the running batch of this pass, which SGLang's own pause retracts."""
    assert stands_still(scheduler), "a step under way would write into memory that is given back"
    batches = [*scheduler.running_mbs, *(one for one in scheduler.last_mbs if one is not None)]
    requests = {id(one): one for batch in batches for one in batch.reqs}
    for batch in scheduler.running_mbs:
        batch.reqs, batch.batch_is_full = [], False
    scheduler.running_batch.reqs = list(requests.values())
    scheduler.last_batch = None
    scheduler.last_mbs[:] = [None] * len(scheduler.last_mbs)


def with_waiting_batches(found: list[Any], scheduler: Any) -> list[Any]:
    """Adds the last steps to the batches that SGLang has collected, to abort or label their requests. Otherwise a
    paused pipeline would miss a request whose prompt has just been computed."""
    return [*found, *scheduler.last_mbs] if is_pipeline() else found
