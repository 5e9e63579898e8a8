"""The filesystem sender: whole directories that a receiver believes, bounded disk, nothing left of a killed trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_plane.errors import InvalidRequest, Unavailable
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.base import SenderContext
from rl_plane.transports.filesystem.sender import FilesystemSender, build
from rl_plane.transports.packing import fill
from rl_plane.weights.checkpoint import open_published
from rl_plane.weights.manifest import Manifest
from tests.support.packed_manifest import MANIFEST, TENSORS
from tests.support.paths import ROOT


def write(sender: FilesystemSender, manifest: Manifest = MANIFEST, mark: bytes = b"abc") -> tuple[Path, str]:
    """Writes a version. Returns its path and its digest."""
    tensors = {**TENSORS, "small": HostTensor(TENSORS["small"].spec, memoryview(mark))}
    path = Path(sender.open(manifest)["path"])
    digests: dict[str, str] = {}
    for number in fill(manifest, tensors.items(), sender.buffer, digests):
        sender.send(number)
    assert not path.exists()
    sender.finish(digests)
    sender.close()
    sender.close()
    digest = manifest.digested(digests).digest
    assert digest is not None
    return path, digest


def test_a_version_is_what_receivers_believe(tmp_path: Path) -> None:
    assert len(MANIFEST.buckets) > 2  # buffers are used again
    path, digest = write(FilesystemSender(tmp_path / "root"))
    checkpoint, stated, tensor_digests = open_published(str(path), [tmp_path], "base")
    assert stated == digest
    assert tensor_digests == checkpoint.tensor_digests()
    assert {name: bytes(tensor.data) for name, tensor in checkpoint.tensors()} == {
        name: bytes(tensor.data) for name, tensor in TENSORS.items()
    }
    checkpoint.close()
    assert sorted(os.listdir(path)) == ["model.safetensors", "rl_plane_manifest.json"]


def test_others_read_it_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path, _ = write(FilesystemSender(tmp_path))
    loaded = load_file(path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {
        name: tensor.spec.shape for name, tensor in TENSORS.items()
    }


def test_an_adapter_has_both_files(tmp_path: Path) -> None:
    config = json.dumps({"peft_type": "LORA", "r": 2}).encode()
    path, digest = write(FilesystemSender(tmp_path), Manifest(MANIFEST.buckets, config))
    checkpoint, stated, _ = open_published(str(path), [tmp_path], "lora")
    assert stated == digest == checkpoint.digest()
    checkpoint.close()
    assert (path / "adapter_config.json").read_bytes() == config


def test_disk_is_bounded_and_what_the_record_names_stays(tmp_path: Path) -> None:
    named: list[dict[str, str]] = []
    sender = FilesystemSender(tmp_path, keep=2, sources=lambda: named)
    paths = []
    for number in range(5):
        path, _ = write(sender, mark=b"%03d" % number)
        paths.append(path)
        if number == 1:  # an adapter of long ago, say; by another way to the same directory
            named += [{"backend": "nixl", "key": "k"}, {"path": f"/mnt/{path.name}"}]
    assert [path.name for path in paths] == sorted(path.name for path in paths)
    assert sorted(tmp_path.iterdir()) == [paths[1], paths[3], paths[4]]
    named.clear()
    path, _ = write(sender, mark=b"end")
    assert sorted(tmp_path.iterdir()) == [paths[4], path]


def test_versions_stay_as_long_as_there_are_no_more_than_the_trainer_keeps(tmp_path: Path) -> None:
    sender = FilesystemSender(tmp_path, keep=4)
    paths = [write(sender, mark=b"%03d" % number)[0] for number in range(6)]
    assert sorted(tmp_path.iterdir()) == paths[2:]


def test_a_directory_of_another_publisher_stays(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v00000001-00000000").mkdir()
    another = FilesystemSender(tmp_path, keep=2, publisher="another")
    theirs = write(another)[0]
    child = os.fork()
    if child == 0:  # it dies half-way, so its directory stays, and has no lock
        another.open(MANIFEST)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    before = set(tmp_path.iterdir())
    assert theirs in before
    sender = FilesystemSender(tmp_path, keep=1, publisher="one")
    mine = [write(sender)[0] for _ in range(3)]
    assert set(tmp_path.iterdir()) == {*before, mine[-1]}
    another.close()


def test_an_update_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    sender = FilesystemSender(tmp_path)
    sender.open(MANIFEST)
    sender.buffer(0)[:] = bytes(MANIFEST.buckets[0].nbytes)
    sender.send(0)
    sender.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Unavailable, match="given up"):
        sender.buffer(1)


_KILLED = """
import sys
from tests.support.packed_manifest import MANIFEST
from rl_plane.transports.filesystem.sender import FilesystemSender
sender = FilesystemSender(sys.argv[1])
sender.open(MANIFEST)
sender.buffer(0)[:] = bytes(MANIFEST.buckets[0].nbytes)
sender.send(0)
print("sent", flush=True)
sys.stdin.read()
"""


def test_a_killed_trainer_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    root = ROOT
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "sent\n"
    (unfinished,) = tmp_path.iterdir()
    assert unfinished.name.startswith(".")
    path, _ = write(FilesystemSender(tmp_path))  # beside a trainer that lives, which is left alone
    assert sorted(tmp_path.iterdir()) == [unfinished, path]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again, _ = write(FilesystemSender(tmp_path))
    assert sorted(tmp_path.iterdir()) == [path, again]


def test_a_full_or_absent_disk_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="can't be written") as caught:
        FilesystemSender(tmp_path / "file" / "root").open(MANIFEST)
    assert caught.value.facts["field"] == "root"


@pytest.mark.parametrize(
    ("root", "options", "field"),
    [
        (None, {}, "root"),
        ("/x", {"keep": 0}, "options.keep"),
        ("/x", {"keep": "2"}, "options.keep"),
        ("/x", {"colour": 1}, "options.colour"),
        ("/x", {"publisher": ""}, "options.publisher"),
    ],
)
def test_wrong_options_are_named(root: str | None, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(SenderContext(lambda op, body: {}, Path(root) if root else None, options))
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


def test_publishers_of_two_components_keep_their_own_versions(tmp_path: Path) -> None:
    paths: dict[str, list[Path]] = {"policy": [], "reward": []}

    def publish(component: str) -> None:
        def run(op: str, body: dict[str, Any]) -> dict[str, Any]:
            sources = [{"backend": "filesystem", "path": str(paths[component][-1])}] if paths[component] else []
            row = {"namespace": "n", "component": component, "status": "ok", "transports": ["filesystem"]}
            return {"version": {"label": "x"}, "sources": sources, "workers": [row]}

        paths[component].append(write(build(SenderContext(run, root=tmp_path)))[0])

    for component in ("reward", "policy", "policy", "policy"):
        publish(component)
    assert paths["reward"][0].exists()
    assert [path.exists() for path in paths["policy"]] == [False, True, True]
