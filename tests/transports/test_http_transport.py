"""The `http` transport against a real HTTP server: what it reads, what it survives, and what it refuses."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, PlaneError, Unavailable
from rl_plane.protocol.canary import Canary
from rl_plane.protocol.versions import TensorSpec
from rl_plane.transports.base import TransportContext
from rl_plane.transports.http import range_reader
from rl_plane.transports.http.receiver import HttpTransport
from rl_plane.weights.checkpoint import ADAPTER_NAME, INDEX_NAME, SINGLE_NAME, Kind, write_manifest
from rl_plane.weights.safetensors_file import write_safetensors
from tests.support.range_server import Behaviour, RangeServer
from tests.support.safetensors_files import SCALAR, A, B, Tensors, read, sharded, single

STALL_S = 1.5
END_S = 30.0
LARGE = {
    f"t{number}": (TensorSpec("U8", (200_000 + number,)), bytes([number]) * (200_000 + number))
    for number in range(6)
}
"""More than the first request of a file brings."""
SECRET = "sig=0123secret"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    (tmp_path / "served").mkdir()
    with RangeServer(tmp_path / "served") as server:
        yield server


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return tmp_path / "served"


@pytest.fixture
def plan(server: RangeServer) -> Behaviour:
    return server.behaviour


def transport_for(*prefixes: str, stall_s: float = STALL_S) -> HttpTransport:
    return HttpTransport(TransportContext(weight_urls=prefixes), stall_s)


def fetch(server: RangeServer, path: str = "", kind: Kind = "base", **more: Any) -> Tensors:
    request = {"backend": "http", "url": f"{server.url}/{path}", **more}
    return read(transport_for(server.url).open(request, kind))


def refused(act: Callable[[], object], kind: type[PlaneError], *words: str) -> PlaneError:
    """The error of `act`, which says these words."""
    with pytest.raises(kind) as caught:
        act()
    assert caught.value.facts.get("fix")
    for word in words:
        assert word in str(caught.value)
    return caught.value


# ---- what it reads ----


@pytest.mark.parametrize("run_bytes", [1, 1 << 26])
def test_one_file_and_shards_are_fetched_by_ranges(server: RangeServer, served: Path, run_bytes: int) -> None:
    """In one range for each file, or each tensor in a range of its own."""

    def fetch_in_runs(path: str) -> Tensors:
        request = {"backend": "http", "url": f"{server.url}/{path}"}
        delivery = transport_for(server.url).open(request, "base")
        delivery.checkpoint.run_bytes = run_bytes
        return read(delivery)

    single(served / "one", {**LARGE, "a": A})
    sharded(served / "many", x={"a": A, **LARGE}, y={"b": B, "c": SCALAR})
    assert fetch_in_runs("one") == {**LARGE, "a": A}
    assert fetch_in_runs("one/") == {**LARGE, "a": A}
    assert fetch_in_runs(f"one/{SINGLE_NAME}") == {**LARGE, "a": A}
    assert fetch_in_runs("many") == {"a": A, **LARGE, "b": B, "c": SCALAR}


def test_ranges_are_read_once(server: RangeServer, served: Path, plan: Behaviour) -> None:
    single(served / "one", LARGE)
    size = (served / "one" / SINGLE_NAME).stat().st_size
    fetch(server, f"one/{SINGLE_NAME}")
    spans = [tuple(map(int, one.range.removeprefix("bytes=").split("-"))) for one in plan.asked if one.range]
    assert sum(last - first + 1 for first, last in spans) <= size + range_reader.HEAD_BYTES
    assert [one.headers["Accept-Encoding"] for one in plan.asked] == ["identity"] * len(plan.asked)


def test_the_files_beside_the_weights_are_fetched_too(server: RangeServer, served: Path) -> None:
    """The manifest's digests, the canary and an adapter's config are read as in a directory."""
    single(served / "one")
    manifest = write_manifest(served / "one")
    (served / "one" / "canary.json").write_text(json.dumps({"sequences": [[1, 2, 3]]}))
    delivery = transport_for(server.url).open({"backend": "http", "url": f"{server.url}/one"}, "base")
    assert (delivery.digest, delivery.refetchable) == (manifest["digest"], True)
    assert isinstance(delivery.canary, Canary)
    assert read(delivery) == {"a": A, "b": B}
    (served / "lora").mkdir()
    write_safetensors(served / "lora" / ADAPTER_NAME, {"base.lora_A.weight": A})
    (served / "lora" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    delivery = transport_for(server.url).open({"backend": "http", "url": f"{server.url}/lora"}, "lora")
    assert delivery.adapter_config == {"peft_type": "LORA", "r": 2}
    assert delivery.adapter_config_raw == (served / "lora" / "adapter_config.json").read_bytes()
    assert read(delivery) == {"base.lora_A.weight": A}
    refused(lambda: fetch(server, "lora"), InvalidWeights, "holds neither")
    refused(lambda: fetch(server, "one", "lora"), InvalidWeights, "adapter_config.json")


def test_weights_are_fetched_by_signed_urls(server: RangeServer, served: Path, plan: Behaviour) -> None:
    """A URL for each file, or one query for all; the files may be at different places."""
    plan.key = SECRET
    sharded(served / "many", x={"a": A}, y={"b": B})
    urls = {name: f"{server.url}/many/{name}?{SECRET}" for name in (INDEX_NAME, "x.safetensors", "y.safetensors")}
    request = {"backend": "http", "urls": urls}
    assert read(transport_for(server.url).open(request, "base")) == {"a": A, "b": B}
    assert fetch(server, f"many?{SECRET}") == {"a": A, "b": B}
    del urls["y.safetensors"]
    refused(lambda: transport_for(server.url).open(request, "base"), InvalidWeights, "y.safetensors")


def test_headers_go_to_the_first_server_only(tmp_path: Path, server: RangeServer, served: Path) -> None:
    single(tmp_path / "elsewhere")
    headers = {"Authorization": "Bearer abc"}
    with RangeServer(tmp_path) as other:
        server.behaviour.redirects["*"] = f"{other.url}/elsewhere/{{name}}"
        request = {"backend": "http", "url": f"{server.url}/{SINGLE_NAME}", "headers": headers}
        assert read(transport_for(server.url, other.url).open(request, "base")) == {"a": A, "b": B}
        assert {one.headers.get("Authorization") for one in server.behaviour.asked} == {"Bearer abc"}
        assert {one.headers.get("Authorization") for one in other.behaviour.asked} == {None}
        refused(
            lambda: transport_for(server.url).open(request, "base"), InvalidRequest, "may not fetch", other.url
        )


def test_a_redirect_is_asked_for_once_and_again_when_its_place_is_gone(
    tmp_path: Path, server: RangeServer, plan: Behaviour
) -> None:
    single(tmp_path / "elsewhere", LARGE)
    with RangeServer(tmp_path) as other:
        plan.redirects["*"] = f"{other.url}/elsewhere/{{name}}"
        request = {"backend": "http", "url": f"{server.url}/{SINGLE_NAME}"}
        delivery = transport_for(server.url, other.url).open(request, "base")
        other.behaviour.statuses[SINGLE_NAME].append(403)  # the signature of the redirect has ended
        assert read(delivery) == LARGE
        assert len(plan.asked) == 2


def test_a_fetch_by_tls_needs_a_trusted_certificate_and_stays_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    single(tmp_path / "one", LARGE)
    with RangeServer(tmp_path, tls=context) as server:
        refused(lambda: fetch(server, "one"), InvalidRequest, "certificate")
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert fetch(server, "one") == LARGE
        with RangeServer(tmp_path) as plain:
            server.behaviour.redirects["*"] = f"{plain.url}/one/{{name}}"
            request = {"backend": "http", "url": f"{server.url}/one/{SINGLE_NAME}"}
            transport = transport_for(server.url, plain.url)
            refused(lambda: transport.open(request, "base"), InvalidWeights, "from https to http")


# ---- what it survives ----


def test_a_cut_connection_continues_at_its_byte(server: RangeServer, served: Path, plan: Behaviour) -> None:
    single(served / "one", LARGE)
    delivery = transport_for(server.url).open(
        {"backend": "http", "url": f"{server.url}/one/{SINGLE_NAME}"}, "base"
    )
    plan.asked.clear()
    plan.cut_after.extend([100_000, 0, 1, 300_000])
    assert read(delivery) == LARGE
    starts = [int(str(one.range).removeprefix("bytes=").partition("-")[0]) for one in plan.asked]
    first = starts[0]
    assert starts == [first, first + 100_000, first + 100_000, first + 100_001, first + 400_001]
    assert all(one.headers.get("If-Range") for one in plan.asked)


def test_a_server_that_is_busy_is_asked_again(server: RangeServer, served: Path, plan: Behaviour) -> None:
    single(served / "one")
    plan.statuses[SINGLE_NAME].extend([503, 429])
    assert fetch(server, f"one/{SINGLE_NAME}") == {"a": A, "b": B}
    plan.statuses[SINGLE_NAME].append(429)
    plan.retry_after = "3600"
    error = refused(lambda: fetch(server, f"one/{SINGLE_NAME}"), Unavailable, "429")
    assert error.facts["retry_after_s"] == 3600.0


def test_weak_etags_are_compared(server: RangeServer, served: Path, plan: Behaviour) -> None:
    plan.weak = True
    single(served / "one", LARGE)
    delivery = transport_for(server.url).open({"backend": "http", "url": f"{server.url}/one"}, "base")
    assert read(delivery) == LARGE
    assert not any("If-Range" in one.headers for one in plan.asked)
    delivery = transport_for(server.url).open({"backend": "http", "url": f"{server.url}/one"}, "base")
    single(served / "one", {name: (spec, bytes(len(data))) for name, (spec, data) in LARGE.items()})
    refused(lambda: read(delivery), InvalidWeights, "changed")


# ---- what it refuses ----


@pytest.mark.parametrize("tensors", [{**LARGE, "t5": (LARGE["t5"][0], bytes(200_005))}, {"a": A}])
def test_a_file_that_changes_after_it_was_opened_is_refused(
    server: RangeServer, served: Path, tensors: Tensors
) -> None:
    """Another content of the same length, and a shorter file."""
    single(served / "one", LARGE)
    delivery = transport_for(server.url).open({"backend": "http", "url": f"{server.url}/one"}, "base")
    single(served / "one", tensors)
    refused(lambda: read(delivery), InvalidWeights, "changed")


def test_an_index_that_changes_while_it_is_opened_is_refused(
    server: RangeServer, served: Path, plan: Behaviour
) -> None:
    sharded(served / "many", x={"a": A}, y={"b": B})

    def change() -> None:
        index = json.loads((served / "many" / INDEX_NAME).read_text())
        (served / "many" / INDEX_NAME).write_text(json.dumps({**index, "metadata": {"total_size": 2}}))

    plan.before["y.safetensors"] = change
    refused(lambda: fetch(server, "many"), InvalidWeights, INDEX_NAME, "changed")


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"ranges": False}, ("range requests", "nginx")),
        ({"coding": "gzip"}, ("compressed (gzip)",)),
        ({"validators": False}, ("ETag",)),
        ({"content_range": "bytes 0-99/*"}, ("no range with a length",)),
        ({"content_range": "bytes 5-99/100"}, ("another range",)),
        ({"content_range": "bytes 0-99999999999/100000000000"}, ("another range",)),
    ],
)
def test_a_server_without_usable_ranges_is_refused_with_the_reason(
    server: RangeServer, served: Path, plan: Behaviour, behaviour: dict[str, Any], words: tuple[str, ...]
) -> None:
    single(served / "one")
    for name, value in behaviour.items():
        setattr(plan, name, value)
    with pytest.raises(InvalidWeights) as caught:
        fetch(server, f"one/{SINGLE_NAME}")
    for word in words:
        assert word in f"{caught.value} {caught.value.facts['fix']}"


def test_a_range_of_another_place_is_refused(server: RangeServer, served: Path, plan: Behaviour) -> None:
    single(served / "one", LARGE)
    size = (served / "one" / SINGLE_NAME).stat().st_size
    delivery = transport_for(server.url).open({"backend": "http", "url": f"{server.url}/one"}, "base")
    plan.content_range = f"bytes 0-{size - 1}/{size}"
    refused(lambda: read(delivery), InvalidWeights, "another range")


def test_damaged_files_are_refused_with_the_reason(server: RangeServer, served: Path) -> None:
    (served / "model.safetensors").write_bytes(b"")
    refused(lambda: fetch(server, ""), InvalidWeights, "truncated")
    (served / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little"))
    refused(lambda: fetch(server, ""), InvalidWeights, "announces a header")
    (served / "model.safetensors").write_bytes((9).to_bytes(8, "little") + b"{not json")
    refused(lambda: fetch(server, ""), InvalidWeights, "can't be read")
    refused(lambda: fetch(server, "nothing"), InvalidWeights, "holds neither")


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_url_that_is_gone_is_reported_without_its_secret(
    server: RangeServer, served: Path, plan: Behaviour, status: int
) -> None:
    single(served / "one")
    request = {
        "backend": "http",
        "urls": {SINGLE_NAME: f"{server.url}/one/{SINGLE_NAME}?Expires=1000000000&{SECRET}"},
    }
    plan.statuses[SINGLE_NAME].append(status)
    error = refused(
        lambda: transport_for(server.url).open(request, "base"),
        InvalidWeights,
        "source_gone",
        str(status),
        "2001-09-09",
    )
    assert SECRET not in str(error.to_wire())


def test_the_answer_of_a_missing_file_is_named(server: RangeServer, served: Path, plan: Behaviour) -> None:
    plan.key = "another"
    single(served / "one")
    refused(lambda: fetch(server, f"one?{SECRET}"), InvalidWeights, "model.safetensors: 403")


def test_the_number_of_redirects_is_bounded(server: RangeServer, plan: Behaviour) -> None:
    plan.redirects["*"] = f"{server.url}/again/{{name}}"
    refused(lambda: fetch(server, ""), InvalidWeights, "redirects")
    assert len(plan.asked) == range_reader.MAX_REDIRECTS + 1


def test_a_redirect_to_a_metadata_service_is_refused(server: RangeServer, plan: Behaviour) -> None:
    plan.redirects["*"] = "http://169.254.169.254/latest/meta-data"
    refused(lambda: fetch(server, ""), InvalidRequest, "169.254.169.254", "may not fetch")


def test_a_host_name_that_leads_to_this_machine_is_refused(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name server may answer anything (DNS rebinding)."""
    really = socket.getaddrinfo

    def lying(host: Any, *more: Any, **named: Any) -> Any:
        return really("127.0.0.1" if host == "weights.example" else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", lying)
    url = f"http://weights.example:{server.port}"
    act = lambda: transport_for(url).open({"backend": "http", "url": url}, "base")  # noqa: E731
    refused(act, InvalidRequest, "leads to 127.0.0.1")
    assert server.behaviour.asked == []


def test_a_closed_server_is_reported_as_unavailable(server: RangeServer) -> None:
    url = server.url
    server.close()
    act = lambda: transport_for(url, stall_s=0.5).open({"backend": "http", "url": url}, "base")  # noqa: E731
    refused(act, Unavailable, "0 bytes", "the connection failed")


def test_a_server_that_sends_nothing_more_is_reported_as_unavailable(
    server: RangeServer, served: Path, plan: Behaviour
) -> None:
    single(served / "one", LARGE)
    request = {"backend": "http", "url": f"{server.url}/one"}
    delivery = transport_for(server.url, stall_s=0.5).open(request, "base")
    plan.statuses[SINGLE_NAME].extend([503] * 100)
    refused(lambda: read(delivery), Unavailable, "came in 0.5 s", "503")


def test_a_server_that_sends_byte_by_byte_is_given_up_as_too_slow(
    server: RangeServer, served: Path, plan: Behaviour
) -> None:
    single(served / "one", LARGE)
    request = {"backend": "http", "url": f"{server.url}/one"}
    delivery = transport_for(server.url, stall_s=0.5).open(request, "base")
    plan.drip = True
    refused(lambda: read(delivery), Unavailable, "too slow")


# ---- the end ----


@pytest.mark.parametrize("by", ["cancel", "close"])
def test_a_cancel_or_a_close_ends_a_read(
    server: RangeServer, served: Path, plan: Behaviour, no_descriptor_leaks: None, by: str
) -> None:
    single(served / "one", LARGE)
    delivery = transport_for(server.url, stall_s=END_S).open(
        {"backend": "http", "url": f"{server.url}/one"}, "base"
    )
    plan.hold_after = 100_000
    cancelled = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            list(delivery.tensors(cancelled.is_set))
        except PlaneError as error:
            failed.append(error)

    reading = threading.Thread(target=work)
    reading.start()
    assert plan.held.wait(END_S)
    (cancelled.set if by == "cancel" else delivery.close)()
    reading.join(END_S)
    assert [type(error) for error in failed] == [EngineFailed]
    delivery.close()
    delivery.close()
    plan.go.set()


def test_no_secret_is_said(
    server: RangeServer, served: Path, plan: Behaviour, caplog: pytest.LogCaptureFixture
) -> None:
    """In no log and in no error, whatever goes wrong."""
    caplog.set_level(logging.DEBUG)
    single(served / "one", LARGE)
    url, headers = f"{server.url}/one?{SECRET}", {"Authorization": "Bearer hush"}
    request = {"backend": "http", "url": url, "headers": headers}
    said = []
    changes: tuple[dict[str, Any], ...] = (
        {"statuses": 403},
        {"statuses": 503},
        {"ranges": False},
        {"key": "other"},
        {"redirects": {"*": f"http://elsewhere.example/?{SECRET}"}},
    )
    for change in changes:
        for name, value in change.items():
            if name == "statuses":
                plan.statuses[SINGLE_NAME].extend([value] * 50)
            else:
                setattr(plan, name, value)
        with pytest.raises(PlaneError) as caught:
            read(transport_for(server.url, stall_s=0.3).open(request, "base"))
        said.append(str(caught.value.to_wire()))
        plan.statuses.clear()
        plan.ranges, plan.key, plan.redirects = True, None, {}
    assert len(said) == 5
    for text in (*said, caplog.text):
        assert SECRET not in text
        assert "hush" not in text
