"""The choice of a component by a request's `model`, and the names under which models are listed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frontend.completions.component_chooser import ComponentChooser
from frontend.completions.model_choice import ComponentModels, component_of, listed_name
from frontend.completions.served_models import ServedModels
from frontend.server.options import MAX_COMPONENTS, FrontendOptions
from rl_plane.errors import InvalidRequest, NotFound, NoWorkers
from rl_plane.membership.core import Member
from rl_plane.protocol.record import CommittedAdapter, VersionSource, first_record
from rl_plane.protocol.versions import WeightVersion

SERVED = [
    ComponentModels("policy", ("tiny", "math")),
    ComponentModels("reference", ("tiny", "org/base")),
    ComponentModels("judge", ("judge-7b", "policy", "org/x")),
    ComponentModels("org", ("base",)),
]


@pytest.mark.parametrize(
    ("asked", "component"),
    [
        ("policy", "policy"),  # although a model of the judge has this name
        ("reference", "reference"),
        ("policy/tiny", "policy"),
        ("reference/tiny", "reference"),
        ("judge/policy", "judge"),
        ("reference/org/base", "reference"),
        ("org/base", "org"),  # although a model of the reference has this name
        ("math", "policy"),
        ("judge-7b", "judge"),
        ("org/x", "judge"),  # although a component is called org
        ("policy/none", "policy"),  # its own error lists its models
    ],
)
def test_a_model_chooses_its_component(asked: str, component: str) -> None:
    assert component_of(asked, SERVED) == component


def test_a_model_of_two_components_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 components serve a model 'tiny': policy, reference") as caught:
        component_of("tiny", SERVED)
    assert caught.value.facts["field"] == "model"
    assert caught.value.facts["models"] == ["policy/tiny", "reference/tiny"]
    assert "send policy/tiny or reference/tiny" in caught.value.facts["fix"]


def test_an_unknown_model_lists_what_is_there() -> None:
    with pytest.raises(NotFound) as caught:
        component_of("x" * 1000, SERVED)
    assert caught.value.facts["models"] == [
        "policy/tiny", "math", "reference/tiny", "reference/org/base", "judge-7b", "judge/policy", "org/x", "base",
    ]  # fmt: skip
    assert len(caught.value.message) < 500
    for name in caught.value.facts["models"]:
        component_of(name, SERVED)


def test_a_model_may_be_one_of_a_component_without_a_first_worker() -> None:
    served = [*SERVED[:1], ComponentModels("later", ("adapter",), is_known=False)]
    assert component_of("math", served) == "policy"
    assert component_of("later", served) == component_of("later/any", served) == "later"
    assert component_of("adapter", served) == "later"  # the record names it
    with pytest.raises(NoWorkers, match="later has had no worker yet") as caught:
        component_of("any", served)
    assert caught.value.http_status == 503
    assert caught.value.facts["models"] == ["tiny", "math", "adapter"]


def test_each_listed_name_means_its_model() -> None:
    for one in SERVED:
        for name in one.names:
            listed = listed_name(one.component, name, SERVED)
            assert component_of(listed, SERVED) == one.component
            assert listed in (name, f"{one.component}/{name}")


class Beside:
    """The generation service of a component: its models, and its models after a read of the record."""

    def __init__(self, name: str, models: tuple[str, ...], read: tuple[str, ...] | None = None) -> None:
        self.component, self.committed, self.reads = name, self, 0
        self._models, self._read = models, read

    def known_models(self) -> ComponentModels:
        return ComponentModels(self.component, self._models)

    def list_models(self) -> dict[str, Any]:
        """The first model is the base. It is empty while no worker is there: then there are adapters alone."""
        base, *adapters = self._models
        rows: list[dict[str, str | None]] = [{"id": base, "parent": None}] if base else []
        return {"data": [*rows, *({"id": name, "parent": base} for name in adapters)]}

    async def try_read(self) -> None:
        self.reads += 1
        self._models = self._read if self._read is not None else self._models


def chooser(*components: Beside) -> ComponentChooser:
    return ComponentChooser(components)  # type: ignore[arg-type]


async def test_an_adapter_that_was_loaded_just_now_is_found() -> None:
    policy, reference = Beside("policy", ("tiny",)), Beside("reference", ("tiny",), read=("tiny", "new"))
    found = chooser(policy, reference)
    assert (await found.choose("policy")).component == (await found.choose(None)).component == "policy"
    assert reference.reads == 0
    assert (await found.choose("new")).component == "reference"
    with pytest.raises(NotFound):
        await found.choose("none")
    with pytest.raises(InvalidRequest):
        await found.choose("tiny")
    assert (policy.reads, reference.reads) == (2, 2)
    assert found.named(None).component == "policy"
    assert found.named("reference").component == "reference"
    with pytest.raises(NotFound, match="served here"):
        found.named("judge")


async def test_a_listener_of_one_component_leaves_every_name_to_it() -> None:
    alone = Beside("policy", ("tiny",))
    assert (await chooser(alone).choose("none")).component == "policy"
    assert alone.reads == 0


def test_every_listed_row_names_models_that_requests_may_name() -> None:
    rows = chooser(Beside("policy", ("tiny", "math")), Beside("reference", ("tiny",)), Beside("dead", ("", "x")))
    assert [(row["id"], row["parent"]) for row in rows.list_models()["data"]] == [
        ("policy/tiny", None), ("math", "policy/tiny"), ("reference/tiny", None), ("x", ""),
    ]  # fmt: skip


# ---- the models of one component ----


def members(*names: str) -> list[Member]:
    return [Member(f"{number:016x}", "one", "s", 1, 1, {"model": name}) for number, name in enumerate(names)]


def models(*names: str, adapters: tuple[str, ...] = (), component: str = "policy") -> ServedModels:
    version = WeightVersion("run", 1, "one", "xxh3:0")
    committed = {name: CommittedAdapter(version, VersionSource(None)) for name in adapters}
    return ServedModels.of(component, members(*names), replace(first_record("xxh3:0"), adapters=committed))


@pytest.mark.parametrize(
    ("asked", "is_served", "adapter"),
    [
        (None, True, None),
        ("tiny", True, None),
        ("policy", True, None),
        ("policy/tiny", True, None),
        ("math", True, "math"),
        ("policy/math", True, "math"),
        ("policy/", False, None),
        ("policy/policy", False, None),
        ("reference/tiny", False, None),
        ("other", False, None),
    ],
)
def test_a_component_knows_its_models_by_short_and_long_names(
    asked: str | None, is_served: bool, adapter: str | None
) -> None:
    served = models("tiny", adapters=("math",))
    assert served.serves(asked) is is_served
    assert served.adapter_of(asked) == adapter
    if is_served:
        assert served.name_of(asked) == (asked or "tiny")
    else:
        with pytest.raises(NotFound):
            served.name_of(asked)


def test_an_adapter_that_is_called_as_its_component_is_still_the_adapter() -> None:
    served = models("tiny", adapters=("policy",))
    assert served.adapter_of("policy") == served.adapter_of("policy/policy") == "policy"
    assert served.adapter_of("tiny") is None


# ---- the options ----


@pytest.mark.parametrize(
    "names", [("engine",), ("a", "a"), tuple(f"c{number}" for number in range(MAX_COMPONENTS))]
)
def test_the_components_beside_the_own_one_are_checked(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        FrontendOptions(also_serve=names)
    assert caught.value.facts["field"] == "also_serve"
    assert caught.value.facts["fix"]
    assert FrontendOptions(also_serve=("a", "b")).also_serve == ("a", "b")
