"""The names that callers give their requests."""

from __future__ import annotations

from frontend.completions.caller_ids import CallerIds


def test_requests_are_found_by_the_names_that_their_callers_gave() -> None:
    ids = CallerIds()
    with ids.under(["mine", "made-1"], "made-1"), ids.under(["mine", "other"], "made-2"):
        assert ids.made_of(["other", "mine", "made-1"]) == {"other": ["made-2"], "mine": ["made-1", "made-2"]}
        assert ids.made_of(["mine-0", "made-1-3", "unknown", "unknown-1"]) == {"mine-0": ["made-1-0", "made-2-0"]}
        assert (ids.given_to("made-1"), ids.given_to("made-2")) == (["mine"], ["mine", "other"])
    assert ids.given_to("made-1") == []
    assert ids.made_of(["mine"]) == {}, "they have ended"
