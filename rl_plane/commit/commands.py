"""The table of commands: each kind of command and its steps. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rl_plane.commit import sessions
from rl_plane.commit.command_state import CommandState, Steps
from rl_plane.commit.machine import UpdateMachine, survey, swap_all, update
from rl_plane.commit.opening import answer
from rl_plane.commit.preparation import decide
from rl_plane.commit.rules import enough, one_model, outcome_of
from rl_plane.commit.steps import Answered, BeginJournal, Outcome, UpdateCommand, Watch
from rl_plane.protocol.record import first_record
from rl_plane.protocol.update_requests import UpdatePolicy

OPEN_BY_THEMSELVES_S = 30.0
"""The longest wait of a new run until the workers serve their own models. They have nothing to load."""


def machine_for(command: UpdateCommand) -> UpdateMachine:
    """The machine that carries out a command of any kind."""
    state = CommandState(command)
    return UpdateMachine(state, STEPS[command.kind](state))


def finish(state: CommandState) -> Steps:
    """Finishes what a coordinator that died had decided, and does nothing else."""
    _, base = yield from survey(state)
    return Outcome(base.made)


def new_run(state: CommandState) -> Steps:
    """Begins a new run: its sequence 0 is the model that every worker was started with."""
    _, base = yield from survey(state)
    update_id = state.command.update_id
    if base.update_id == update_id:
        return (yield from answer(state, base, UpdatePolicy()))
    record = replace(
        first_record(one_model(state.seen.reports), base.run_number + 1), update_id=update_id, open=False
    )
    yield BeginJournal(base)
    decided = yield from decide(record)
    yield from swap_all(state, decided, {}, UpdatePolicy())
    watched: Answered = yield Watch(record.opened(), OPEN_BY_THEMSELVES_S)
    return enough(outcome_of(record, watched.replies), UpdatePolicy())


STEPS: Mapping[str, Callable[[CommandState], Steps]] = {
    "update": update,
    "finish": finish,
    "new_run": new_run,
    "prepare": sessions.prepare_only,
    "receive_part": sessions.receive_part,
    "label": sessions.label,
    "complete": sessions.complete,
    "abort": sessions.abort_only,
}
