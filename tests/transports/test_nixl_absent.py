"""Workers and trainers without nixl, or with a nixl that does not work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rl_plane.errors import PlaneError, Unsupported
from rl_plane.transports.nixl.sender import NixlSender
from rl_plane.transports.registry import is_passed_over
from tests.support.nixl_trainers import update_of

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = pytest.mark.timeout(400)


async def test_without_nixl_it_is_not_offered_and_the_error_names_the_extra(plane: Plane) -> None:
    lacking = """
import importlib.util
import sys
from pathlib import Path
sys.modules.pop("rl_plane.transports.nixl.receiver", None)  # the process that was forked may have it
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "nixl" else find_spec(name, *more)
"""
    worker, client = plane.spawn(patch=lacking), await plane.client()
    described = await client.call(worker.instance_id, "describe")
    assert "nixl" not in described.body["transports"]
    assert "filesystem" in described.body["transports"]
    with pytest.raises(Unsupported) as caught:
        await client.run("update_weights", update_of({"backend": "nixl"}, "one"))
    assert "rl-plane[nixl]" in caught.value.facts["fix"]


def test_without_nixl_a_sender_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)  # as if it weren't installed
    with pytest.raises(PlaneError) as caught:
        NixlSender()
    assert "rl-plane[nixl]" in caught.value.facts["fix"]


WITHOUT_A_LIBRARY = 'raise ImportError("libnixl.so: cannot open shared object file")'
WITHOUT_UCX = """
nixl_agent_config = dict
def nixl_agent(*_, **__):
    raise RuntimeError("no UCX")
"""


@pytest.mark.parametrize(
    ("package", "words"), [(WITHOUT_A_LIBRARY, "cannot open shared object file"), (WITHOUT_UCX, "no UCX")]
)
def test_a_nixl_that_does_not_work_is_passed_over(
    package: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nixl.py").write_text(package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl")  # it is imported anew, and again by the next test
    with pytest.raises(Unsupported, match=words) as caught:
        NixlSender()
    assert caught.value.facts["field"] == "transport.backend"
    assert caught.value.__cause__ is not None
    assert is_passed_over(caught.value)
