"""I7, I2: when nothing fails any more, every worker serves the committed version, and no call is stuck."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim import product
from tests.sim.checks import Violation
from worker.worker import Worker

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World


def problem(world: World) -> Violation | None:
    last = world.checks.record
    if last is None:
        return Violation("I7", "there is no record")
    living = set()
    for process, worker in world.live_workers():
        living.add(product.instance_id(worker))
        if (found := _problem_of(world, process, worker)) is not None:
            return found
    if last.key not in world.checks.final_at:
        return Violation("I2", f"the update {last} was left half done")
    members = set(world.members())
    if members != living:
        return Violation("I7", f"the members are {sorted(members)}, alive are {sorted(living)}")
    if doubles := [one.name for one in world.doubles if one.alive and world.is_replaced(one)]:
        return Violation("I1", f"{', '.join(doubles)} still runs under an id that another process has taken")
    return None


def _problem_of(world: World, process: Process, worker: Worker) -> Violation | None:
    last = world.checks.record
    assert last is not None
    paused = world.desired.paused()
    instance_id = product.instance_id(worker)
    held, closed = product.holds(worker), product.closed(worker)
    may_be = world.desired.may_be(instance_id, process)
    if "memory" in closed and "memory" in may_be:
        return None  # nothing can be loaded into it now
    if (busy := product.staged_in(worker)) is not None and not world.session_waits():
        return Violation("I2", f"{process.name} still holds staged weights of {busy}")
    if world.checks.may_lack(process, last):
        may_be |= {"behind", "numerics", "starting"}
    elif held != last.held and not ("numerics" in may_be and "behind" in closed):
        label = held.version.label if held is not None else "nothing"
        return Violation("I7", f"{process.name} holds {label}, committed is {last}: {closed}")
    if held != last.held and not closed:
        return Violation("I3", f"{process.name} is open, and does not hold {last}")
    if closed.keys() - may_be:
        return Violation("I7", f"{process.name} is closed: {closed}")
    if "disabled" not in closed and world.desired.is_disabled(instance_id):
        return Violation("I7", f"{process.name} was disabled by an operator, and is open")
    if paused is not None and paused != product.is_paused(worker):
        return Violation("I7", f"{process.name} is {'running' if paused else 'paused'}, and should not be")
    return None
