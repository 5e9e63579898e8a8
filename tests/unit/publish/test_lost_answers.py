"""A publisher whose frontend restarts, or whose fleet is locked, waits for it, and says what it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import (
    Conflict,
    DeadlineExceeded,
    FrontendEnding,
    InvalidWeights,
    Locked,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from rl_plane.weights.safetensors_file import write_safetensors
from tests.support.safetensors_files import A
from tests.support.scripted_facade import (
    DROP,
    Answer,
    NotedPushingSender,
    NotedSender,
    ScriptedFacade,
    publisher_to,
    scripted,
)

__all__ = ["scripted"]

ENDING = Unavailable("this frontend is ending", retry_after_s=1.0)
AWAY: list[Answer] = [DROP, 502, 503, 504, ENDING, FrontendEnding("it ends"), DROP]
"""All that a publisher may get while its only frontend restarts behind a proxy."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", {"a": A})
    return tmp_path


def test_an_update_outlives_a_restart_of_the_only_frontend(scripted: ScriptedFacade, source: Path) -> None:
    scripted.answers["update_weights"] = [*AWAY, {"version": {"label": "one"}}]
    sender = NotedSender()
    with publisher_to(scripted, source, sender) as publisher:
        assert publisher.publish("one").result()["version"] == {"label": "one"}
    ids = scripted.ids_of("update_weights")
    assert len(ids) == len(AWAY) + 1
    assert len(set(ids)) == 1
    assert sender.events == ["open", "keep", "close"]


def test_a_pushed_update_outlives_a_restart_of_the_only_frontend(scripted: ScriptedFacade, source: Path) -> None:
    scripted.answers["prepare_weights_update"] = [*AWAY, {}]
    scripted.answers["complete_weights_update"] = [*AWAY, {"version": {"label": "one"}}]
    with publisher_to(scripted, source, NotedPushingSender()) as publisher:
        assert publisher.publish("one").result()["version"] == {"label": "one"}
    ids = scripted.ids_of("prepare_weights_update") + scripted.ids_of("complete_weights_update")
    assert len(ids) == 2 * len(AWAY) + 2
    assert len(set(ids)) == 1


def test_the_outcome_is_unknown_if_the_frontend_stays_away(scripted: ScriptedFacade, source: Path) -> None:
    scripted.answers |= {"update_weights": [DROP], "updates": [DROP]}
    publisher = publisher_to(scripted, source, NotedSender(), others_s=0.0)
    with publisher, pytest.raises(OutcomeUnknown, match="one may be committed"):
        publisher.publish("one")


def test_weights_that_may_be_committed_can_be_fetched_until_the_next_version(
    scripted: ScriptedFacade, source: Path
) -> None:
    scripted.answers |= {"update_weights": [DROP, {"version": {"label": "two"}}], "updates": [DROP]}
    sender = NotedSender()
    with publisher_to(scripted, source, sender, others_s=0.0) as publisher:
        with pytest.raises(OutcomeUnknown):
            publisher.publish("one")
        assert sender.events == ["open"]
        publisher.publish("two")
    assert sender.events == ["open", "close", "open", "keep", "close"]


def test_a_frontend_that_is_away_has_nothing_prepared_for_good(scripted: ScriptedFacade, source: Path) -> None:
    """An update that could not be aborted is aborted before the next one is opened."""
    scripted.answers |= {
        "complete_weights_update": [InvalidWeights("they do not fit"), {"version": {"label": "two"}}],
        "abort_weights_update": [DROP, NotFound("it has ended")],
    }
    with publisher_to(scripted, source, NotedPushingSender()) as publisher:
        with pytest.raises(InvalidWeights):
            publisher.publish("one")
        publisher.publish("two")
    first, second = scripted.ids_of("prepare_weights_update")
    assert scripted.ids_of("abort_weights_update") == [first, first]
    changing = [asked for asked in scripted.asked if "weights_update" in asked[0]]
    assert changing.index(("prepare_weights_update", second)) == len(changing) - 2


@pytest.mark.parametrize("sender", [NotedSender, NotedPushingSender])
def test_an_update_waits_for_another_trainers_update(
    sender: type[NotedSender], scripted: ScriptedFacade, source: Path
) -> None:
    pushes = issubclass(sender, NotedPushingSender)
    op = "complete_weights_update" if pushes else "update_weights"
    scripted.answers[op] = [*[Locked("another update is under way")] * 5, {"version": {"label": "one"}}]
    with publisher_to(scripted, source, sender()) as publisher:
        publisher.publish("one")
    assert len(scripted.ids_of(op)) == 6
    assert len(set(scripted.ids_of(op))) == 1


def test_another_trainers_update_is_not_waited_for_without_end(scripted: ScriptedFacade, source: Path) -> None:
    scripted.answers["update_weights"] = [Locked("another update is under way")]
    with publisher_to(scripted, source, NotedSender(), others_s=0.0) as publisher, pytest.raises(Locked):
        publisher.publish("one")


@pytest.mark.parametrize(("outcome", "kept"), [("committed", True), ("aborted", False)])
def test_weights_are_kept_after_an_error_only_if_this_update_has_committed_them(
    outcome: str, kept: bool, scripted: ScriptedFacade, source: Path
) -> None:
    """The fleet serves the same weights by an earlier update."""

    def version() -> dict[str, Any]:
        return {"version": {"digest": scripted.bodies["update_weights"]["digest"]}, "adapters": {}}

    def updates() -> dict[str, Any]:
        own = {"update_id": scripted.ids_of("update_weights")[0], "outcome": outcome, **version()["version"]}
        return {"updates": [own, {**own, "update_id": "earlier", "outcome": "committed"}]}

    scripted.answers |= {
        "update_weights": [Conflict("too few workers serve the version")],
        "updates": [updates],
        "state": [version],
    }
    sender = NotedSender()
    with publisher_to(scripted, source, sender) as publisher, pytest.raises(Conflict):
        publisher.publish("one")
    assert ("keep" in sender.events) is kept


def test_an_answer_that_never_comes_leaves_the_outcome_unknown(scripted: ScriptedFacade, source: Path) -> None:
    """A device on the way has dropped the idle connection, and the fleet has committed the version."""

    def updates() -> dict[str, Any]:
        ids = scripted.ids_of("update_weights")
        return {"updates": [{"update_id": ids[0], "outcome": "committed"}]}

    scripted.answers |= {"update_weights": [DeadlineExceeded("no answer")], "updates": [updates]}
    sender = NotedSender()
    with publisher_to(scripted, source, sender) as publisher:
        with pytest.raises(OutcomeUnknown, match="one may be committed"):
            publisher.publish("one")
        assert sender.events == ["open", "keep", "close"]
