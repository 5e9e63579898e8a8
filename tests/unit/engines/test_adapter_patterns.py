"""Regular expressions of an adapter that would hold a worker up."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plane.errors import InvalidWeights
from worker.engines.common import adapter_patterns
from worker.engines.common.adapter_patterns import check_patterns_end

NAMES = [f"model.layers.{layer}.self_attn.{one}_proj" for layer in range(48) for one in "qkvo"]
ENDLESS = r"(\w+\.?)+!"


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|k)_proj"},
        {
            "target_modules": ["q_proj"],
            "rank_pattern": {"^model.layers.(0|1).*q_proj": 4},
            "exclude_modules": None,
        },
        {"rank_pattern": {"(": 4}},
    ],
)
def test_the_patterns_of_adapters_are_fine(config: dict[str, Any]) -> None:
    check_patterns_end(config, NAMES)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("target_modules", ENDLESS),
        ("rank_pattern", {"(": 1, ENDLESS: 2}),
        ("layers_pattern", ["layers", ENDLESS]),
        ("exclude_modules", ["q_proj{99999999999}", ENDLESS]),
        ("alpha_pattern", {rf"x)|({ENDLESS}": 1}),  # it compiles as a part of a larger one alone
    ],
)
def test_a_pattern_without_end_is_refused(setting: str, value: Any) -> None:
    with pytest.raises(InvalidWeights) as caught:
        check_patterns_end({setting: value}, NAMES, within_s=1.0)
    assert caught.value.facts["field"] == f"adapter_config.{setting}"
    assert caught.value.facts["fix"]


@pytest.mark.parametrize("value", [5, True, False, [5], [None], [["q_proj"]]])
def test_a_setting_without_patterns_is_refused(value: Any) -> None:
    with pytest.raises(InvalidWeights) as caught:
        check_patterns_end({"exclude_modules": value}, NAMES)
    assert caught.value.facts["field"] == "adapter_config.exclude_modules"
    assert caught.value.facts["fix"]


def test_a_pattern_that_ends_the_trial_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_patterns, "_TRY", "raise MemoryError")
    with pytest.raises(InvalidWeights) as caught:
        check_patterns_end({"target_modules": "q.proj|x*"}, NAMES)
    assert caught.value.facts["field"] == "adapter_config.target_modules"
    assert caught.value.facts["fix"]
