"""Helpers of `tests/transports/test_object_store.py` and of other tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Plane
from tests.support.object_publisher import Publisher

MakePublisher = Callable[..., Publisher]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Callable[..., Publisher]]:
    made: list[Publisher] = []

    def make(plane: Plane, **options: Any) -> Publisher:
        given = {"nats_url": plane.url, "namespace": plane.namespace, "component": plane.component, **options}
        made.append(Publisher(tmp_path / f"publisher{len(made)}.log", **given))
        return made[-1]

    yield make
    for one in made:
        one.kill()
