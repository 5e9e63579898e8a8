"""The filesystem transport and the safetensors reader, against good checkpoints and every kind of bad one."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from xxhash import xxh3_128

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, Unavailable
from rl_plane.protocol.strict_json import load_json_object
from rl_plane.protocol.versions import DigestAlgorithm, TensorSpec, tensors_digest
from rl_plane.transports.base import Delivery, TransportContext, WeightTransport
from rl_plane.transports.checkpoint_delivery import CheckpointDelivery
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from rl_plane.weights.checkpoint import (
    INDEX_NAME,
    MANIFEST_NAME,
    MAX_FILES,
    SINGLE_NAME,
    open_checkpoint,
    write_manifest,
)
from rl_plane.weights.rooted_files import MAX_JSON_BYTES
from rl_plane.weights.safetensors_file import READ_BYTES, write_safetensors
from tests.support.replaced_files import replaced_while_opened
from tests.support.safetensors_files import SCALAR, A, B, Tensors, read, refusal, request, sharded, single

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")


EMPTY = (TensorSpec("F16", (0, 7)), b"")


# what is read


def test_the_filesystem_is_a_transport_without_settings(transport: FilesystemTransport, root: Path) -> None:
    seam: WeightTransport = transport
    assert seam.backend == "filesystem"
    seam.init({"backend": "filesystem"})
    seam.init({})
    seam.destroy()
    seam.destroy()
    with pytest.raises(InvalidRequest, match="port"):
        seam.init({"port": 1})


def test_a_directory_and_a_file_give_the_same(transport: FilesystemTransport, root: Path) -> None:
    tensors = {"a": A, "scalar": SCALAR, "empty": EMPTY, "b": B}
    directory = single(root / "step_1", tensors)
    for path in (directory, directory / SINGLE_NAME, f"{directory}/", f"{root}/x/../step_1"):
        delivery = transport.open(request(path), "base")
        assert delivery.refetchable
        assert delivery.digest is None
        assert delivery.tensor_digests is None
        assert delivery.specs == {name: spec for name, (spec, _) in tensors.items()}
        assert read(delivery) == tensors


def test_the_safetensors_package_reads_what_we_write_and_the_other_way_round(
    transport: FilesystemTransport, root: Path
) -> None:
    import numpy
    import safetensors
    from safetensors.numpy import save

    write_safetensors(root / "a.safetensors", {"a": A, "scalar": SCALAR}, {"format": "pt"})
    theirs = dict(safetensors.deserialize((root / "a.safetensors").read_bytes()))  # type: ignore[no-untyped-call]
    assert bytes(theirs["a"]["data"]) == A[1]
    assert theirs["a"]["shape"] == [2, 3]
    array = numpy.frombuffer(A[1], numpy.float32).reshape(2, 3)
    raw = save({"z": array}, {"format": "pt"})
    (root / "b.safetensors").write_bytes(raw)
    assert read(transport.open(request(root / "b.safetensors"), "base")) == {"z": A}


def test_shards_are_read_as_one_set_of_tensors(transport: FilesystemTransport, root: Path) -> None:
    directory = sharded(root / "c", one={"a": A, "s": SCALAR}, two={"b": B})
    assert read(transport.open(request(directory), "base")) == {"a": A, "s": SCALAR, "b": B}


def test_a_delivery_is_read_once_and_closed_twice(transport: FilesystemTransport, root: Path) -> None:
    delivery: Delivery = transport.open(request(single(root / "c")), "base")
    assert isinstance(delivery, CheckpointDelivery)
    list(delivery.tensors())
    with pytest.raises(RuntimeError, match="once"):
        delivery.tensors()
    delivery.close()
    delivery.close()


def test_a_closed_delivery_can_not_be_read(transport: FilesystemTransport, root: Path) -> None:
    delivery = transport.open(request(single(root / "c")), "base")
    tensors = delivery.tensors()
    delivery.close()
    with pytest.raises(EngineFailed, match="closed"):
        next(tensors)


def test_the_caller_owns_the_delivered_tensors(transport: FilesystemTransport, root: Path) -> None:
    """Staging keeps the memory, and torch.frombuffer warns of read-only memory."""
    delivery = transport.open(request(single(root / "c")), "base")
    taken = dict(delivery.tensors())
    delivery.close()
    for name, (_, data) in {"a": A, "b": B}.items():
        assert (bytes(taken[name].data), taken[name].owned, taken[name].data.readonly) == (data, True, False)


def test_large_tensors_are_read_in_pieces(transport: FilesystemTransport, root: Path) -> None:
    nbytes = READ_BYTES + 5
    large = (TensorSpec("U8", (nbytes,)), random.Random(1).randbytes(nbytes))
    write_safetensors(root / "large.safetensors", {"a": A, "large": large})
    assert read(transport.open(request(root / "large.safetensors"), "base")) == {"a": A, "large": large}


# where it may read


@pytest.mark.parametrize(
    "path", [None, 7, True, b"/x", ["x"], {}, "", ".", "relative/dir", "~/x", "/a\0b", "/" + "a" * 5000, "/\ud800"]
)
def test_an_impossible_path_is_refused_and_the_fix_names_the_roots(
    transport: FilesystemTransport, root: Path, path: Any
) -> None:
    error = refusal(transport, path)
    assert str(root) in error.facts["fix"]
    json.dumps(error.to_wire(), ensure_ascii=False).encode()


def test_unknown_fields_are_refused(transport: FilesystemTransport, root: Path) -> None:
    directory = single(root / "c")
    with pytest.raises(InvalidRequest, match="'subdir'") as caught:
        transport.open(request(directory, subdir="x"), "base")
    assert caught.value.facts["field"] == "transport.subdir"


def test_a_path_outside_the_roots_is_refused(transport: FilesystemTransport, root: Path, tmp_path: Path) -> None:
    outside = single(tmp_path / "rootless")  # shares its first letters with the root
    (root / "link").symlink_to(outside)
    for path in (
        outside,
        root / "link",
        f"{root}/../rootless",
        outside / SINGLE_NAME,
        root / "link" / SINGLE_NAME,
    ):
        error = refusal(transport, path)
        assert "outside" in error.message
        assert str(root) in error.facts["fix"]


def test_the_answer_does_not_reveal_what_exists_outside(transport: FilesystemTransport, tmp_path: Path) -> None:
    there = single(tmp_path / "secret")
    told = refusal(transport, there).message.replace("secret", "X")
    assert refusal(transport, tmp_path / "absent").message.replace("absent", "X") == told


def test_without_roots_nothing_is_read(root: Path) -> None:
    error = refusal(FilesystemTransport(TransportContext()), single(root / "c"))
    assert "RL_PLANE_WEIGHT_ROOTS" in error.facts["fix"]


def test_symlinks_inside_the_roots_are_fine(root: Path, tmp_path: Path) -> None:
    """A Hugging Face cache consists of symlinks, and a root may be a symlink too."""
    blobs = root / "blobs"
    blobs.mkdir()
    write_safetensors(root / "x", {"a": A, "b": B})
    (root / "x").rename(blobs / "0123")
    snapshot = root / "snapshot"
    snapshot.mkdir()
    (snapshot / SINGLE_NAME).symlink_to("../blobs/0123")
    (tmp_path / "rootlink").symlink_to(root)
    transport = FilesystemTransport(TransportContext((tmp_path / "other", tmp_path / "rootlink")))
    for path in (snapshot, snapshot / SINGLE_NAME, tmp_path / "rootlink" / "snapshot"):
        assert read(transport.open(request(path), "base")) == {"a": A, "b": B}


def test_links_that_lead_outside_the_roots_are_refused(
    transport: FilesystemTransport, root: Path, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "out.safetensors", {"b": B})
    directory = root / "c"
    directory.mkdir()
    (directory / SINGLE_NAME).symlink_to(tmp_path / "out.safetensors")
    assert "outside" in refusal(transport, directory).message

    directory = sharded(root / "d", {"a": "one.safetensors", "b": "two.safetensors"}, one={"a": A})
    (directory / "two.safetensors").symlink_to("../../out.safetensors")
    assert "'two.safetensors' leads outside" in refusal(transport, directory).message

    (tmp_path / "index").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    (directory / INDEX_NAME).unlink()
    (directory / INDEX_NAME).symlink_to(tmp_path / "index")
    assert "outside" in refusal(transport, directory).message

    directory = single(root / "e")
    (directory / MANIFEST_NAME).symlink_to("/etc/passwd")
    assert "outside" in refusal(transport, directory).message


def test_a_symlink_that_changes_after_the_check_is_refused(
    transport: FilesystemTransport, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safetensors(tmp_path / "out.safetensors", {"b": B})
    directory = single(root / "c")
    real = os.path.realpath

    def swapping(path: Any) -> str:
        found = real(path)
        if found.endswith(f"c/{SINGLE_NAME}"):
            (directory / "kept").write_bytes((directory / SINGLE_NAME).read_bytes())
            (directory / SINGLE_NAME).unlink()
            (directory / SINGLE_NAME).symlink_to(tmp_path / "out.safetensors")
            return str(directory / "kept")
        return str(found)

    monkeypatch.setattr(os.path, "realpath", swapping)
    assert "outside" in refusal(transport, directory).message


def test_absent_files_and_dangling_links_are_refused(transport: FilesystemTransport, root: Path) -> None:
    (root / "dangling").symlink_to(root / "nothing")
    (root / "loop").symlink_to(root / "loop")
    single(root / "c")
    for path in ("absent", "dangling", "loop", f"c/{SINGLE_NAME}/below", "a" * 300):
        assert "is not there" in refusal(transport, root / path).message
    (root / "c" / SINGLE_NAME).unlink()
    (root / "c" / SINGLE_NAME).symlink_to(root / "nothing")
    assert SINGLE_NAME in refusal(transport, root / "c").message


@contextmanager
def limit(kind: int, soft: int) -> Iterator[None]:
    """Sets a limit of this process for a while."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_a_file_that_the_system_refuses_to_open_is_named(
    transport: FilesystemTransport, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test raises the error of permissions itself, because root, who may run the tests, may read everything."""
    directory = single(root / "c")
    real = os.open

    def refusing(number: int) -> Callable[..., int]:
        def refuse(path: Any, *how: Any, **more: Any) -> int:
            if str(path).endswith(SINGLE_NAME):
                raise OSError(number, os.strerror(number))
            return real(path, *how, **more)

        return refuse

    monkeypatch.setattr(os, "open", refusing(errno.EACCES))
    assert "may not read" in refusal(transport, directory).message
    monkeypatch.undo()
    with limit(resource.RLIMIT_NOFILE, 0), pytest.raises(Unavailable, match="Too many open files"):
        transport.open(request(directory), "base")


def test_a_path_that_is_no_regular_file_is_refused_at_once(transport: FilesystemTransport, root: Path) -> None:
    os.mkfifo(root / "fifo.safetensors")
    assert "fifo" in refusal(transport, root / "fifo.safetensors").message
    directory = root / "c"
    directory.mkdir()
    os.mkfifo(directory / SINGLE_NAME)
    assert "fifo" in refusal(transport, directory, InvalidWeights).message
    (directory / SINGLE_NAME).unlink()
    (directory / SINGLE_NAME).mkdir()
    assert "a directory" in refusal(transport, directory, InvalidWeights).message
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(root / "s"))
        assert "socket" in refusal(transport, root / "s").message
    finally:
        listener.close()
    assert "a device" in refusal(FilesystemTransport(TransportContext((Path("/dev"),))), "/dev/null").message


def test_a_fifo_that_took_the_files_place_is_refused_without_a_wait(
    transport: FilesystemTransport, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fifo appears after the file was looked at. Opening it must not wait for a writer."""
    directory = single(root / "c")
    good = os.stat(directory / SINGLE_NAME)
    (directory / SINGLE_NAME).unlink()
    os.mkfifo(directory / SINGLE_NAME)
    real = os.stat

    def stale(path: Any, **how: Any) -> os.stat_result:
        return good if str(path).endswith(f"c/{SINGLE_NAME}") else real(path, **how)

    monkeypatch.setattr(os, "stat", stale)
    assert "fifo" in refusal(transport, directory, InvalidWeights).message


def test_pickles_are_never_loaded(transport: FilesystemTransport, root: Path) -> None:
    directory = root / "c"
    directory.mkdir()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    error = refusal(transport, directory, InvalidWeights)
    assert "pytorch_model.bin" in error.message
    assert "never loaded" in error.facts["fix"]
    for name in ("pytorch_model.bin", "x.pt"):
        (directory / name).touch()
        assert "never loaded" in refusal(transport, directory / name).facts["fix"]
    single(directory)  # beside safetensors they disturb no reader
    assert read(transport.open(request(directory), "base")) == {"a": A, "b": B}


def test_a_directory_without_weights_is_refused(transport: FilesystemTransport, root: Path) -> None:
    assert "neither" in refusal(transport, root, InvalidWeights).message
    write_safetensors(root / "adapter_model.safetensors", {"a": A})
    assert "adapter_model.safetensors" in refusal(transport, root, InvalidWeights).message
    (root / "config.json").write_text("{}")
    assert "*.safetensors" in refusal(transport, root / "config.json").message


# the index


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "no weight_map"),
        ([], "no weight_map"),
        ({"a": "../one.safetensors"}, "not the name"),
        ({"a": "/etc/one.safetensors"}, "not the name"),
        ({"a": "sub/one.safetensors"}, "not the name"),
        ({"a": ".."}, "not the name"),
        ({"a": ""}, "not the name"),
        ({"a": 3}, "not the name"),
        ({"a": None}, "not the name"),
        ({"a": "one\0.safetensors"}, "not the name"),
        ({"a": "one\ud800.safetensors"}, "surrogates not allowed"),
        ({"a": "x" * 300 + ".safetensors"}, "not the name"),
        ({"a": "one.bin"}, "not the name"),
        ({"a": "one.safetensors", "b": "three.safetensors"}, "'three.safetensors', which is not in"),
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, "'c' into a shard"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b' into a shard"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "into a shard that doesn't hold it"),
        ({"b": "two.safetensors", "z": "one.safetensors"}, "'one.safetensors' holds 'a', not in"),
    ],
)
def test_a_wrong_or_hostile_index_is_refused(
    transport: FilesystemTransport, root: Path, weight_map: Any, message: str
) -> None:
    directory = sharded(root / "c", weight_map, one={"a": A}, two={"b": B})
    error = refusal(transport, directory, InvalidWeights)
    assert message in error.message
    json.dumps(error.to_wire(), ensure_ascii=False).encode()


def test_a_tensor_in_two_shards_is_refused(transport: FilesystemTransport, root: Path) -> None:
    directory = sharded(root / "c", one={"a": A, "s": SCALAR}, two={"b": B, "a": A})
    assert "'a' is in 'one.safetensors' and in" in refusal(transport, directory, InvalidWeights).message
    directory = sharded(
        root / "d", {"a": "one.safetensors", "b": "two.safetensors"}, one={"a": A, "b": B}
    )  # the same file by two names
    (directory / "two.safetensors").symlink_to("one.safetensors")
    assert "and in" in refusal(transport, directory, InvalidWeights).message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff{}", b'{"weight_map": {"a": "x", "a": "y"}}', b"NaN"])
def test_an_index_that_is_no_json_object_is_refused(
    transport: FilesystemTransport, root: Path, content: bytes
) -> None:
    (root / INDEX_NAME).write_bytes(content)
    assert INDEX_NAME in refusal(transport, root, InvalidWeights).message


def test_an_index_with_too_many_files_or_bytes_is_refused(transport: FilesystemTransport, root: Path) -> None:
    directory = sharded(root / "c", one={"a": A})
    shards = {f"t{number}": f"{number}.safetensors" for number in range(MAX_FILES + 1)}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": shards}))
    assert f"{MAX_FILES + 1} files, more than {MAX_FILES}" in refusal(transport, directory, InvalidWeights).message
    os.truncate(directory / INDEX_NAME, MAX_JSON_BYTES + 1)
    assert f"more than {MAX_JSON_BYTES} bytes" in refusal(transport, directory, InvalidWeights).message


def test_a_single_file_beside_an_index_of_other_files_is_refused(
    transport: FilesystemTransport, root: Path
) -> None:
    directory = sharded(root / "c", one={"a": A})
    single(directory)
    assert "two checkpoints" in refusal(transport, directory, InvalidWeights).message
    sharded(directory, {"a": SINGLE_NAME, "b": SINGLE_NAME})
    assert read(transport.open(request(directory), "base")) == {"a": A, "b": B}


# the header


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin: Any, end: Any, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HUGE = (1 << 63) - 1

BAD_HEADERS: list[tuple[str, Any, bytes, str]] = [
    ("truncated", {"a": entry(0, 8)}, b"1234567", "truncated: its tensors have 8 bytes"),
    ("trailing", {"a": entry(0, 8)}, b"123456789", "1 trailing bytes"),
    ("no tensors but bytes", {}, b"1", "1 trailing bytes"),
    ("overlap", {"a": entry(0, 5), "b": entry(4, 8)}, bytes(8), "'b' overlaps 'a'"),
    ("same place", {"a": entry(0, 4), "b": entry(0, 4)}, bytes(4), "overlaps"),
    ("hole", {"a": entry(0, 3), "b": entry(4, 8)}, bytes(8), "bytes before 'b' belong to no tensor"),
    ("late begin", {"a": entry(1, 8)}, bytes(8), "does not begin at 0"),
    ("unknown dtype", {"a": entry(0, 8, "F13")}, bytes(8), "'F13'"),
    ("dtype no string", {"a": entry(0, 8, ["U8"])}, bytes(8), "dtype"),
    ("length of dtype", {"a": entry(0, 8, "F32", [8])}, bytes(8), "32 bytes, but its data_offsets span 8"),
    ("negative side", {"a": entry(0, 8, "U8", [-8])}, bytes(8), "shape"),
    ("two negative sides", {"a": entry(0, 8, "U8", [-2, -4])}, bytes(8), "shape"),
    ("float side", {"a": entry(0, 8, "U8", [8.0])}, bytes(8), "shape"),
    ("bool side", {"a": entry(0, 1, "U8", [True])}, bytes(1), "shape"),
    ("shape no list", {"a": entry(0, 8, "U8", 8)}, bytes(8), "shape"),
    ("rank", {"a": entry(0, 8, "U8", [1] * 17 + [8])}, bytes(8), "shape"),
    ("huge product", {"a": entry(0, 8, "U8", [HUGE] * 16)}, bytes(8), "2^64 or more bytes"),
    ("huge offsets", {"a": entry(0, HUGE, "U8", [HUGE])}, bytes(8), "truncated"),
    ("backwards", {"a": entry(8, 0, "U8", [8])}, bytes(8), "data_offsets"),
    ("negative offset", {"a": entry(-8, 0)}, bytes(8), "data_offsets"),
    ("float offset", {"a": entry(0, 8.0, "U8", [8])}, bytes(8), "data_offsets"),
    ("three offsets", {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 8]}}, bytes(8), "data_offsets"),
    ("no offsets", {"a": {"dtype": "U8", "shape": [8]}}, bytes(8), "exactly dtype"),
    ("extra key", {"a": {**entry(0, 8), "device": "cuda"}}, bytes(8), "exactly dtype"),
    ("entry no object", {"a": [0, 8]}, bytes(8), "exactly dtype"),
    ("empty name", {"": entry(0, 8)}, bytes(8), "can't be the name"),
    ("new line in a name", {"a F32 2x3 00\nb": entry(0, 8)}, bytes(8), "can't be the name"),
    ("space in a name", {"a b": entry(0, 8)}, bytes(8), "can't be the name"),
    ("surrogate in a name", {"\ud800": entry(0, 8)}, bytes(8), "surrogates not allowed"),
    ("long name", {"a" * 513: entry(0, 8)}, bytes(8), "can't be the name"),
    ("metadata no object", {"__metadata__": [], "a": entry(0, 8)}, bytes(8), "__metadata__"),
    ("metadata no strings", {"__metadata__": {"x": 1}, "a": entry(0, 8)}, bytes(8), "__metadata__"),
    ("list", [], b"", "'{'"),
    ("leading space", b' {"a": 1}', b"", "'{'"),
    ("empty header", b"", b"", "'{'"),
    ("broken", b'{"a": ', b"", "can't be read"),
    ("not utf-8", b'{"\xff": 1}', b"", "can't be read"),
    ("utf-16", '{"a": 1}'.encode("utf-16-le"), b"", "can't be read"),
    ("nan", b'{"a": NaN}', b"", "NaN is not JSON"),
    ("long number", b'{"a": ' + b"9" * 5000 + b"}", b"", "can't be read"),
    ("deep", b'{"a": ' + b"[" * 100_000, b"", "can't be read"),
    ("twice", b'{"a": 1, "a": 1}', b"", "'a' is there twice"),
    ("twice within", b'{"a": {"dtype": "U8", "dtype": "U8"}}', b"", "'dtype' is there twice"),
]


@pytest.mark.parametrize(
    ("header", "data", "message"), [case[1:] for case in BAD_HEADERS], ids=[c[0] for c in BAD_HEADERS]
)
def test_a_bad_header_is_refused_and_its_file_named(
    transport: FilesystemTransport, root: Path, header: Any, data: bytes, message: str
) -> None:
    error = refusal(transport, raw_file(root / "bad.safetensors", header, data), InvalidWeights)
    assert message in error.message
    assert "bad.safetensors" in error.message
    assert error.facts["file"] == "bad.safetensors"
    assert len(error.message) < 2000
    json.dumps(error.to_wire(), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (struct.pack("<Q", 100) + b"{}", "truncated: its header alone has 100 bytes"),
        (struct.pack("<Q", HUGE), "more than"),
        (b"\xff" * 64, "more than"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "more than"),
    ],
)
def test_a_bad_length_of_a_file_or_its_header_is_refused(
    transport: FilesystemTransport, root: Path, content: bytes, message: str
) -> None:
    path = root / "bad.safetensors"
    path.write_bytes(content)
    assert message in refusal(transport, path, InvalidWeights).message


def test_a_bad_shard_is_named_and_the_others_are_closed(transport: FilesystemTransport, root: Path) -> None:
    directory = sharded(root / "c", one={"a": A}, two={"b": B})
    with open(directory / "two.safetensors", "ab") as file:
        file.write(b"!")
    assert "'two.safetensors'" in refusal(transport, directory, InvalidWeights).message


def test_every_truncation_is_refused(transport: FilesystemTransport, root: Path) -> None:
    directory = single(root / "c")
    whole = (directory / SINGLE_NAME).read_bytes()
    for length in range(len(whole)):
        (directory / SINGLE_NAME).write_bytes(whole[:length])
        refusal(transport, directory, InvalidWeights)


def test_json_keys_twice_are_found_at_any_depth() -> None:
    with pytest.raises(ValueError, match="twice"):
        load_json_object(b'{"x": [{"k": 1, "k": 2}]}')


# files that change


def test_a_file_that_changes_while_it_is_open_is_refused(transport: FilesystemTransport, root: Path) -> None:
    for change in (b"X", None):
        directory = single(root / "c")
        delivery = transport.open(request(directory), "base")
        tensors = delivery.tensors()
        next(tensors)
        with open(directory / SINGLE_NAME, "r+b") as file:
            if change is None:
                file.truncate(os.path.getsize(directory / SINGLE_NAME) - 8)
            else:
                file.seek(-1, os.SEEK_END)
                file.write(change)
        os.utime(directory / SINGLE_NAME, ns=(1, 1))  # whatever the clock's grain
        with pytest.raises(InvalidWeights, match="changed while read") as caught:
            list(tensors)
        assert caught.value.facts["field"] == "transport.path"
        delivery.close()


def test_a_shard_that_changes_after_it_was_read_is_refused(transport: FilesystemTransport, root: Path) -> None:
    directory = sharded(root / "c", one={"a": A}, two={"b": B})
    delivery = transport.open(request(directory), "base")
    tensors = delivery.tensors()
    assert next(tensors)[0] == "a"
    assert next(tensors)[0] == "b"
    os.utime(directory / "one.safetensors", ns=(1, 1))
    with pytest.raises(InvalidWeights, match=r"'one\.safetensors' changed"):
        next(tensors)
    delivery.close()


def test_replacing_by_rename_changes_nothing_for_who_has_it_open(
    transport: FilesystemTransport, root: Path
) -> None:
    directory = sharded(root / "c", one={"a": A}, two={"b": B})
    delivery = transport.open(request(directory), "base")
    tensors = delivery.tensors()
    got = {name: bytes(tensor.data) for name, tensor in (next(tensors),)}
    other = (TensorSpec("BF16", (4,)), b"ABCDEFGH")
    write_safetensors(directory / "two.safetensors", {"b": other})
    directory.rename(root / "old")
    sharded(directory, one={"a": A}, two={"b": other})
    got |= {name: bytes(tensor.data) for name, tensor in tensors}
    delivery.close()
    assert got == {"a": A[1], "b": B[1]}
    assert read(transport.open(request(directory), "base"))["b"] == other


def test_a_checkpoint_replaced_while_it_is_opened_is_refused(transport: FilesystemTransport, root: Path) -> None:
    """The index and the first shard are new, and the second shard is old. They are never mixed, although they fit."""
    directory = sharded(root / "c", one={"a": A}, two={"b": B})

    def replace(name: str) -> None:
        if name == "one.safetensors":
            sharded(directory, one={"a": A}, two={"b": (B[0], b"ABCDEFGH")})

    with replaced_while_opened(replace):
        assert "replaced while" in refusal(transport, directory, InvalidWeights).message


def test_a_failing_disk_is_not_the_requests_fault(
    transport: FilesystemTransport, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = transport.open(request(single(root / "c")), "base")

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(Unavailable, match="Input/output error"):
        list(delivery.tensors())
    delivery.close()


def test_closing_waits_for_a_read_to_leave_the_descriptor(
    transport: FilesystemTransport, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor closed under a read could be another file's by then."""
    directory = single(root / "c")
    delivery = transport.open(request(directory), "base")
    reading, go = threading.Event(), threading.Event()
    real: Callable[..., int] = os.preadv
    outcome: list[Any] = []

    def slow(*how: Any) -> int:
        reading.set()
        assert go.wait(10)
        return real(*how)

    monkeypatch.setattr(os, "preadv", slow)

    def reader() -> None:
        try:
            outcome.extend(delivery.tensors())
        except EngineFailed as error:
            outcome.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    assert reading.wait(10)
    delivery.close()
    go.set()
    thread.join(10)
    assert [type(item) for item in outcome] == [EngineFailed]


# the manifest


@pytest.mark.parametrize(("algorithm", "hashed"), [("xxh3", xxh3_128), ("blake3", blake3)])
def test_a_written_manifest_has_the_digests_of_the_tensors(
    transport: FilesystemTransport, root: Path, algorithm: DigestAlgorithm, hashed: Callable[[bytes], Any]
) -> None:
    directory = sharded(root / "c", one={"a": A, "e": EMPTY}, two={"b": B})
    manifest = write_manifest(directory, algorithm)
    assert json.loads((directory / MANIFEST_NAME).read_text()) == manifest
    digests = {name: hashed(data).hexdigest() for name, (_, data) in {"a": A, "b": B, "e": EMPTY}.items()}
    expected = tensors_digest((n, s, digests[n]) for n, s in {"a": A[0], "b": B[0], "e": EMPTY[0]}.items())
    assert manifest["digest"] == expected
    assert manifest["files"] == {
        name: os.path.getsize(directory / name) for name in ("one.safetensors", "two.safetensors")
    }
    delivery = transport.open(request(directory), "base")
    assert delivery.digest == expected
    assert delivery.tensor_digests == digests
    assert read(delivery) == {"a": A, "b": B, "e": EMPTY}
    (directory / MANIFEST_NAME).write_text("an old one, and broken")
    assert write_manifest(directory, algorithm) == manifest
    assert sorted(os.listdir(directory)) == sorted(
        [INDEX_NAME, MANIFEST_NAME, "one.safetensors", "two.safetensors"]
    )


def test_write_manifest_refuses_a_directory_without_weights(root: Path) -> None:
    with pytest.raises(InvalidRequest, match="not a directory") as caught:
        write_manifest(root / "absent")
    assert caught.value.facts["field"] == "directory"
    with pytest.raises(InvalidWeights):
        write_manifest(root)
    assert os.listdir(root) == []


def drop(manifest: dict[str, Any], *keys: str) -> None:
    for key in keys[:-1]:
        manifest = manifest[key]
    del manifest[keys[-1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(v=2), "version '2'"),
        (lambda m: m.update(v=True), "version 'True'"),
        (lambda m: drop(m, "v"), "version"),
        (lambda m: m.update(more=1), "exactly the keys"),
        (lambda m: drop(m, "files"), "exactly the keys"),
        (lambda m: m.update(digest=7), "must have a digest"),
        (lambda m: m.update(digest="sha256:00"), "must have a digest"),
        (lambda m: m.update(digest="xxh3:" + "0" * 32), "digests make"),
        (lambda m: m.update(digest="blake3:" + "0" * 64), "64 hex digits"),
        (lambda m: m.update(tensors=[]), "objects"),
        (lambda m: m.update(files=[]), "objects"),
        (lambda m: m["files"].update({SINGLE_NAME: 1}), "other files"),
        (lambda m: m["files"].update({"x": 1}), "other files"),
        (lambda m: m["files"].clear(), "other files"),
        (lambda m: drop(m, "tensors", "a"), "same tensors: 'a'"),
        (lambda m: m["tensors"].update(z=m["tensors"]["a"]), "same tensors: 'z'"),
        (lambda m: m["tensors"].update(a=1), "exactly dtype"),
        (lambda m: drop(m, "tensors", "a", "shape"), "exactly dtype"),
        (lambda m: m["tensors"]["a"].update(shape=[3, 2]), "dtype or shape of 'a'"),
        (lambda m: m["tensors"]["a"].update(dtype="I32"), "dtype or shape of 'a'"),
        (lambda m: m["tensors"]["a"].update(digest="00"), "32 hex digits"),
        (lambda m: m["tensors"]["a"].update(digest=None), "32 hex digits"),
        (lambda m: m["tensors"]["a"].update(digest="0" * 64), "32 hex digits"),
        (lambda m: m["tensors"]["a"].update(digest="0" * 32), "digests make"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    transport: FilesystemTransport, root: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    manifest = write_manifest(single(root / "c"))
    change(manifest)
    (root / "c" / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert message in refusal(transport, root / "c", InvalidWeights).message


def test_a_manifest_with_a_key_twice_is_refused(transport: FilesystemTransport, root: Path) -> None:
    (single(root / "c") / MANIFEST_NAME).write_bytes(b'{"v": 1, "v": 1}')
    assert "twice" in refusal(transport, root / "c", InvalidWeights).message


def test_a_single_file_is_read_without_the_directorys_manifest(transport: FilesystemTransport, root: Path) -> None:
    write_manifest(single(root / "c"))
    write_safetensors(root / "c" / "other.safetensors", {"z": B})
    delivery = transport.open(request(root / "c" / "other.safetensors"), "base")
    assert delivery.digest is None
    assert read(delivery) == {"z": B}


# the writer


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": (TensorSpec("F32", (2,)), b"1234567")},
        {"a b": A},
        {"": A},
        {"__metadata__": A},
    ],
)
def test_the_writer_writes_nothing_wrong(root: Path, tensors: Tensors) -> None:
    with pytest.raises(ValueError, match=r"needs|can't be the name"):
        write_safetensors(root / "x.safetensors", tensors)
    assert os.listdir(root) == []


def test_a_failed_write_leaves_the_old_file(root: Path) -> None:
    write_safetensors(root / "x.safetensors", {"a": A})
    before = (root / "x.safetensors").read_bytes()
    with limit(resource.RLIMIT_FSIZE, 8), pytest.raises(OSError, match="File too large"):
        write_safetensors(root / "x.safetensors", {"b": B})
    assert os.listdir(root) == ["x.safetensors"]
    assert (root / "x.safetensors").read_bytes() == before


def test_an_operators_own_path_may_be_relative(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single(root / "c")
    monkeypatch.chdir(root)
    checkpoint = open_checkpoint(Path("c"))
    assert set(checkpoint.specs) == {"a", "b"}
    checkpoint.close()
