"""The receiving half of `http`: safetensors files from any server that answers range requests.

The files are those of a checkpoint's or an adapter's directory. They are opened, checked and read as files of a disk
are, by range requests on up to `READERS` connections.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from rl_plane._util.tasks import Cancelled, never
from rl_plane.errors import InvalidRequest, InvalidWeights
from rl_plane.protocol.canary import CANARY_NAME, MAX_CANARY_BYTES
from rl_plane.protocol.strict_json import load_json_object
from rl_plane.protocol.versions import ADAPTER_CONFIG_NAME, HostTensor
from rl_plane.transports.base import TransportContext, WeightTransport, check_fields
from rl_plane.transports.checkpoint_delivery import CheckpointDelivery
from rl_plane.transports.http.range_reader import STALL_S, RangeReader, RangeStream, Refused, RemoteFile
from rl_plane.transports.http.wire import BACKEND, Source, is_file_name, parse_source
from rl_plane.weights.allowed_urls import Allowed
from rl_plane.weights.checkpoint import Checkpoint, Kind, open_folder
from rl_plane.weights.manifest import MAX_CONFIG_BYTES
from rl_plane.weights.read_ahead import ReadAhead
from rl_plane.weights.rooted_files import MAX_JSON_BYTES, listed
from rl_plane.weights.safetensors_file import SafetensorsFile

READERS = 4
"""The connections of one update. An object store gives some 100 MB/s on each."""

_LIMITS = {ADAPTER_CONFIG_NAME: MAX_CONFIG_BYTES, CANARY_NAME: MAX_CANARY_BYTES}
_ABSENT = frozenset((404, 410))


class HttpTransport(WeightTransport):
    """The `http` backend. Keeps nothing between two updates."""

    backend = BACKEND

    def __init__(self, context: TransportContext, stall_s: float = STALL_S) -> None:
        """`stall_s`: see STALL_S."""
        self._allowed = Allowed.of(context.weight_urls)
        self._stall_s = stall_s

    def open(self, request: Mapping[str, Any], kind: Kind) -> HttpDelivery:
        check_fields(self.backend, request, "url", "urls", "headers")
        source = parse_source(request, self._allowed)
        reader = RangeReader(source, self._allowed, self._stall_s)
        try:
            checkpoint, digest, tensor_digests = open_folder(UrlFolder(source, reader), source.shown, kind)
        except BaseException:
            reader.close()
            raise
        checkpoint.readers = READERS
        return HttpDelivery(checkpoint, digest, tensor_digests, reader)


class HttpDelivery(CheckpointDelivery):
    """The tensors of a checkpoint, or of an adapter, behind URLs."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        digest: str | None,
        tensor_digests: Mapping[str, str] | None,
        reader: RangeReader,
    ) -> None:
        super().__init__(checkpoint, digest, tensor_digests)
        self._reader = reader
        self._ahead: ReadAhead[tuple[str, HostTensor]] | None = None

    def tensors(self, cancelled: Cancelled = never) -> Iterator[tuple[str, HostTensor]]:
        # The thread of `ahead` waits for the network, and this one for `cancelled` too.
        self._ahead = ReadAhead(super().tensors(cancelled), cancelled, self._reader.interrupt)
        return iter(self._ahead)

    def close(self) -> None:
        self._reader.interrupt()
        if self._ahead is not None:
            self._ahead.close()
        super().close()
        self._reader.close()


class UrlFolder:
    """The files of one request, as `rl_plane.weights.checkpoint` opens them."""

    def __init__(self, source: Source, reader: RangeReader) -> None:
        self.field = source.field
        self._source = source
        self._reader = reader
        self._found: dict[str, RemoteFile | None] = {}
        self._refused: dict[str, int] = {}
        """Files that may be there, and that the server does not give: the name and the answer's status."""

    def names(self) -> list[str]:
        return sorted(self._source.urls)

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def open_weights(self, name: str) -> SafetensorsFile:
        return UrlFile(self._reader, self._get(name))

    def read_json(self, name: str, max_bytes: int | None = None) -> tuple[dict[str, Any], bytes, Hashable]:
        file, limit = self._get(name), _LIMITS.get(name, MAX_JSON_BYTES) if max_bytes is None else max_bytes
        if file.nbytes > limit:
            raise self.refuse(
                f"{name!r} has {file.nbytes} bytes, more than {limit}", "check that it is the right file"
            )
        raw = bytearray(file.nbytes)
        raw[: len(file.head)] = file.head
        stream, view = self._reader.stream(file, len(file.head), len(raw)), memoryview(raw)
        try:
            while stream.at < stream.end:
                stream.read_into(view[stream.at :])
        finally:
            stream.close()
        view.release()
        try:
            return load_json_object(bytes(raw)), bytes(raw), _identity(file)
        except ValueError as error:
            raise self.refuse(f"{name!r} can't be read: {str(error)[:200]}", "write it again") from error

    def check_same(self, name: str, identity: Hashable) -> None:
        """Raises InvalidWeights if a file that was read whole has changed. Each later answer checks the others."""
        file = self._get(name)
        if name.endswith(".json") and _identity(self._reader.locate(name, file.url)) != identity:
            raise self._reader.changed(file)

    def refuse(self, what: str, fix: str) -> InvalidWeights:
        if self._refused:
            answers = [f"{name}: {status}" for name, status in self._refused.items()]
            what += f" (the server's answers: {listed(answers)})"
        return InvalidWeights(what, field=self.field, fix=fix)

    def _find(self, name: str) -> RemoteFile | None:
        if name not in self._found:
            self._found[name] = self._located(name)
        return self._found[name]

    def _located(self, name: str) -> RemoteFile | None:
        url = self._source.url_of(name) if is_file_name(name) else None
        if url is None:
            return None
        try:
            return self._reader.locate(name, url)
        except Refused as error:
            if self._source.base is None:
                raise  # the request says that the file is there
            if error.status not in _ABSENT:
                self._refused[name] = error.status
            return None

    def _get(self, name: str) -> RemoteFile:
        file = self._find(name)
        if file is None:
            raise InvalidRequest(
                f"{name!r} is not there",
                field=self.field,
                fix="publish all files, and check the names in the request",
            )
        return file


class UrlFile(SafetensorsFile):
    """A safetensors file behind a URL. Each thread reads ranges of its own."""

    def __init__(self, reader: RangeReader, file: RemoteFile) -> None:
        self._reader = reader
        self._file = file
        self._place = _ReadPosition()
        super().__init__(file.name, file.nbytes, _identity(file), reader.field)

    def will_read(self, offset: int, nbytes: int) -> None:
        self._place.end = offset + nbytes

    def _read_some(self, offset: int, view: memoryview) -> int:
        head = self._file.head[offset : offset + len(view)]
        if head:
            view[: len(head)] = head
            return len(head)
        place = self._place
        if place.stream is None or place.stream.at != offset or place.stream.end == offset:
            end = min(self.nbytes, max(place.end, offset + len(view)))
            if end <= offset:
                return 0
            if place.stream is not None:
                place.stream.close()
            place.stream = self._reader.stream(self._file, offset, end)
        return place.stream.read_into(view)

    def check_unchanged(self) -> None:
        """Does nothing: each answer of the server was compared with the first."""

    def close(self) -> None:
        """Does nothing: the connections belong to the reader."""


class _ReadPosition(threading.local):
    """The place at which one thread reads a file."""

    stream: RangeStream | None = None
    end = 0
    """The end of the bytes that `will_read` has announced."""


def _identity(file: RemoteFile) -> Hashable:
    return file.nbytes, file.etag or file.modified, file.head
