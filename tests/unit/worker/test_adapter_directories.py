"""PEFT adapter directories through the filesystem transport."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128

from rl_plane.errors import InvalidRequest, InvalidWeights
from rl_plane.protocol.versions import ADAPTER_CONFIG_NAME, TensorSpec, tensors_digest
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from rl_plane.weights.checkpoint import ADAPTER_NAME, SINGLE_NAME, write_manifest
from rl_plane.weights.manifest import MAX_CONFIG_BYTES
from rl_plane.weights.safetensors_file import write_safetensors
from tests.support.replaced_files import replaced_while_opened
from tests.support.safetensors_files import SCALAR, A, B, Tensors, read, refusal, request, sharded, single

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")

LORA = {"peft_type": "LORA", "r": 1}


def adapter(directory: Path, config: Any = LORA, tensors: Tensors | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / ADAPTER_NAME, tensors or {"a": A, "b": B})
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    (directory / ADAPTER_CONFIG_NAME).write_bytes(raw)
    return directory


def adapter_refusal(
    transport: FilesystemTransport, path: Path, kind: type[InvalidRequest] = InvalidWeights
) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        transport.open(request(path), "lora").close()
    assert type(caught.value) is kind
    assert caught.value.facts["field"] == "transport.path"
    assert caught.value.facts["fix"]
    return caught.value


def test_an_adapter_directory_gives_its_config_and_tensors(transport: FilesystemTransport, root: Path) -> None:
    path = adapter(root / "lora", b'{"peft_type":  "LORA", "r": 1}\n')
    delivery = transport.open(request(path), "lora")
    assert delivery.adapter_config == LORA
    assert delivery.adapter_config_raw == (path / ADAPTER_CONFIG_NAME).read_bytes()
    assert delivery.specs == {"a": A[0], "b": B[0]}
    assert (delivery.digest, delivery.tensor_digests, delivery.refetchable) == (None, None, True)
    assert read(delivery) == {"a": A, "b": B}
    base = transport.open(request(single(root / "base")), "base")
    assert (base.adapter_config, base.adapter_config_raw) == (None, None)
    base.close()


def test_a_directory_of_the_other_kind_is_refused_with_a_fix(transport: FilesystemTransport, root: Path) -> None:
    lora, base = adapter(root / "lora"), single(root / "base")
    assert "kind: lora" in refusal(transport, lora, InvalidWeights).facts["fix"]
    assert "kind: base" in adapter_refusal(transport, base).facts["fix"]
    assert "kind: base" in adapter_refusal(transport, sharded(root / "shards", one={"a": A})).facts["fix"]
    assert ADAPTER_CONFIG_NAME in adapter_refusal(transport, base / SINGLE_NAME).facts["fix"]
    both = adapter(single(root / "both", {"c": SCALAR}))
    assert set(read(transport.open(request(both), "lora"))) == {"a", "b"}
    assert set(read(transport.open(request(both), "base"))) == {"c"}


def test_an_incomplete_adapter_is_refused(transport: FilesystemTransport, root: Path) -> None:
    empty, no_weights, pickled = root / "empty", root / "no-weights", root / "pickled"
    empty.mkdir()
    assert ADAPTER_CONFIG_NAME in adapter_refusal(transport, empty).message
    (adapter(no_weights) / ADAPTER_NAME).unlink()
    assert ADAPTER_NAME in adapter_refusal(transport, no_weights).message
    (adapter(pickled) / ADAPTER_NAME).rename(pickled / "adapter_model.bin")
    assert "runs code" in adapter_refusal(transport, pickled).facts["fix"]
    adapter_refusal(transport, root / "absent", InvalidRequest)
    cut = adapter(root / "cut") / ADAPTER_NAME
    cut.write_bytes(cut.read_bytes()[:-1])
    assert "truncated" in adapter_refusal(transport, root / "cut").message


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'{"r": 1, "r": 2}', b'{"r": NaN}', '{"r": 1}'.encode("utf-16"), b"[" * 99_999]
)
def test_a_config_that_is_no_json_object_is_refused(
    transport: FilesystemTransport, root: Path, raw: bytes
) -> None:
    assert ADAPTER_CONFIG_NAME in adapter_refusal(transport, adapter(root / "lora", raw)).message


def test_a_config_longer_than_its_bound_is_refused(transport: FilesystemTransport, root: Path) -> None:
    config = json.dumps(LORA).encode()
    transport.open(request(adapter(root / "largest", config.ljust(MAX_CONFIG_BYTES))), "lora").close()
    beyond = adapter(root / "beyond", config.ljust(MAX_CONFIG_BYTES + 1))
    assert f"more than {MAX_CONFIG_BYTES} bytes" in adapter_refusal(transport, beyond).message


def test_an_adapter_outside_the_roots_is_refused(
    transport: FilesystemTransport, root: Path, tmp_path: Path
) -> None:
    outside = adapter(tmp_path / "outside")
    assert "outside the weight roots" in adapter_refusal(transport, outside, InvalidRequest).message
    for name in (ADAPTER_NAME, ADAPTER_CONFIG_NAME):
        path = adapter(root / f"to-{name}")
        (path / name).unlink()
        (path / name).symlink_to(outside / name)
        assert "outside the weight roots" in adapter_refusal(transport, path, InvalidRequest).message
    os.mkfifo(root / f"to-{ADAPTER_NAME}" / "fifo")
    (root / f"to-{ADAPTER_NAME}" / "fifo").replace(root / f"to-{ADAPTER_NAME}" / ADAPTER_CONFIG_NAME)
    adapter_refusal(transport, root / f"to-{ADAPTER_NAME}")


def test_a_tensor_with_the_configs_name_is_refused(transport: FilesystemTransport, root: Path) -> None:
    path = adapter(root / "lora", tensors={"a": A, ADAPTER_CONFIG_NAME: B})
    assert ADAPTER_CONFIG_NAME in adapter_refusal(transport, path).message


def test_an_adapters_manifest_covers_its_config_too(transport: FilesystemTransport, root: Path) -> None:
    path = adapter(root / "lora")
    manifest = write_manifest(path)
    raw = (path / ADAPTER_CONFIG_NAME).read_bytes()
    digests = {"a": xxh3_128(A[1]).hexdigest(), "b": xxh3_128(B[1]).hexdigest()}
    config = (ADAPTER_CONFIG_NAME, TensorSpec("U8", (len(raw),)), xxh3_128(raw).hexdigest())
    assert manifest["digest"] == tensors_digest([("a", A[0], digests["a"]), ("b", B[0], digests["b"]), config])
    delivery = transport.open(request(path), "lora")
    assert (delivery.digest, delivery.tensor_digests) == (manifest["digest"], digests)
    delivery.close()
    # Other bytes of the same length: only the digest shows the difference.
    (path / ADAPTER_CONFIG_NAME).write_bytes(raw.replace(b"1", b"2"))
    assert "its tensors' digests make" in adapter_refusal(transport, path).message
    (path / ADAPTER_CONFIG_NAME).write_bytes(raw + b" ")
    assert "other lengths" in adapter_refusal(transport, path).message


def test_a_config_replaced_while_the_adapter_is_opened_is_refused(
    transport: FilesystemTransport, root: Path
) -> None:
    path = adapter(root / "lora")

    def replace(name: str) -> None:
        (path / "fresh").write_text(json.dumps(LORA | {"r": 2}))
        (path / "fresh").replace(path / ADAPTER_CONFIG_NAME)

    with replaced_while_opened(replace):
        assert "was replaced" in adapter_refusal(transport, path).message
