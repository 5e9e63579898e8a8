"""Checks and hashes weights on their way from a transport to an engine. Knows neither of the two.

Everything here reads, hashes and copies, so it runs on a thread and never on a loop.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rl_plane.errors import EngineFailed, InvalidWeights
from rl_plane.protocol.versions import (
    DEFAULT_ALGORITHM,
    DIGEST_PATTERN,
    DTYPE_BYTES,
    DigestAlgorithm,
    HostTensor,
    TensorSpec,
    algorithm_of,
    tensor_digest,
    tensors_digest,
)
from rl_plane.transports.base import Delivery
from rl_plane.weights import delta_codec
from rl_plane.weights.checkpoint import Kind, Places, open_checkpoint
from rl_plane.weights.hashed_copy import copy, copy_hashed, is_same_memory
from rl_plane.weights.manifest import CHANGED_FIX, are_digests
from worker.receive.received_bytes import ReceivedBytes
from worker.receive.staging_area import StagingArea
from worker.receive.weight_holder import Staged, WeightHolder

log = logging.getLogger("worker.receive.staging")

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes that `cast` converts between. 8-bit floats are not among them: they mean nothing without their scales."""

SHOWN = 5
"""A message names so many tensors of each kind, and counts the others."""

SHOWN_CHARS = 200
"""A message shows so much of a tensor's name."""


BASE_FIX = "publish a full checkpoint of the model that this engine runs"
TIE_FIX = (
    "start the engine from files that have both tensors, with a config whose tie_word_embeddings is false, or tie the "
    "trainer's"
)
OWN_TIE_FIX = (
    "start the engine with a config whose tie_word_embeddings is false, or save the model with its head tied"
)
SOME_FIX = "publish tensors of the model that this engine runs, in its dtypes"
ADAPTER_FIX = "publish an adapter of this model as PEFT saves it, with save_embedding_layers=False"


def check_specs(
    wanted: Mapping[str, TensorSpec],
    tied: Mapping[str, str],
    offered: Mapping[str, TensorSpec],
    cast: bool,
    fix: str = BASE_FIX,
) -> None:
    """InvalidWeights unless `offered` has the tensors that a model needs. Reads no byte of the weights.

    A name that is `tied` to another may be missing. If it is there, it must fit `wanted`, if `wanted` has it, and equal
    the tensor to which it is tied. The error's facts are `missing`, `unexpected`, `wrong_shape`, `wrong_dtype` and
    `tied`, each `{count, names}` with the first few names.
    """
    missing = sorted(name for name in wanted if name not in offered and name not in tied)
    unexpected = sorted(name for name in offered if name not in wanted and name not in tied)
    both = sorted(name for name in wanted if name in offered)
    wrong_shape = [name for name in both if wanted[name].shape != offered[name].shape]
    other_dtype = [name for name in both if wanted[name].dtype != offered[name].dtype]
    castable = [name for name in other_dtype if {wanted[name].dtype, offered[name].dtype} <= FLOAT_DTYPES]
    wrong_dtype = [name for name in other_dtype if not cast or name not in set(castable)]
    if not (missing or unexpected or wrong_shape or wrong_dtype):
        _check_ties(tied, offered)
        _tell_of_cast({(offered[name].dtype, wanted[name].dtype) for name in castable})
        return

    def shapes(name: str) -> str:
        return f"{_short(name)} is {list(offered[name].shape)}, the model has {list(wanted[name].shape)}"

    def dtypes(name: str) -> str:
        return f"{_short(name)} is {offered[name].dtype}, the model has {wanted[name].dtype}"

    parts = [
        *_part("missing", missing, _short),
        *_part("unknown to the model", unexpected, _short),
        *_part("of another shape", wrong_shape, shapes),
        *_part("of another dtype", wrong_dtype, dtypes),
    ]
    only_cast = not (missing or unexpected or wrong_shape) and not cast and len(castable) == len(wrong_dtype)
    raise InvalidWeights(
        f"the weights do not fit the model: {'; '.join(parts)}",
        field="cast" if only_cast else "transport",
        fix="pass cast: true, or publish the weights in the model's dtype" if only_cast else fix,
        missing=_fact(missing),
        unexpected=_fact(unexpected),
        wrong_shape=_fact(wrong_shape),
        wrong_dtype=_fact(wrong_dtype),
    )


def _check_ties(
    tied: Mapping[str, str],
    of: Mapping[str, TensorSpec] | Mapping[str, str],
    field: str | None = None,
    fix: str = TIE_FIX,
) -> None:
    """InvalidWeights if both tensors of a pair are there and their specs or digests differ.

    The model has one tensor for the pair, so it would serve only one of the two. `field` None: the first such name."""
    broken = sorted(name for name, to in tied.items() if name in of and to in of and of[name] != of[to])
    if broken:
        first = broken[0]
        raise InvalidWeights(
            f"this engine's model ties {_short(first)} to {_short(tied[first])}, but they differ: {of[first]}, and "
            f"{of[tied[first]]}",
            field=field or first,
            fix=fix,
            tied=_fact(broken),
        )


_cast_told: set[tuple[str, str]] = set()


def _tell_of_cast(dtypes: set[tuple[str, str]]) -> None:
    """Logs each pair of dtypes once per process, because a trainer sends the same dtypes with each update."""
    for given, own in sorted(dtypes - _cast_told):
        _cast_told.add((given, own))
        log.info("the update allows a cast: weights come as %s, and the model has %s", given, own)


def not_fitting(error: InvalidWeights) -> bool:
    """Returns whether the model has other tensors. If not, the bytes were wrong."""
    return bool(error.facts.keys() & {"missing", "unexpected", "wrong_shape", "wrong_dtype", "tied"})


def _short(name: str) -> str:
    return repr(name[:SHOWN_CHARS])


def _part(what: str, names: list[str], show: Callable[[str], str]) -> Iterator[str]:
    if names:
        more = ", …" if len(names) > SHOWN else ""
        yield f"{len(names)} {what} ({', '.join(map(show, names[:SHOWN]))}{more})"


def _fact(names: list[str]) -> dict[str, object] | None:
    return {"count": len(names), "names": [name[:SHOWN_CHARS] for name in names[:SHOWN]]} if names else None


class DigestingStream:
    """Yields a delivery's tensors, after it has checked and hashed each of them. Can be iterated once.

    After the last tensor it compares the digest of the whole, and raises InvalidWeights instead of ending. So an engine
    that reads the stream to its end never finishes staging wrong weights.
    """

    def __init__(
        self,
        delivery: Delivery,
        *,
        tied: Mapping[str, str] | None = None,
        expected_digest: str | None = None,
        algorithm: DigestAlgorithm | None = None,
        places: Places | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        progress: ReceivedBytes | None = None,
    ) -> None:
        """Makes the stream.

        Args:
            tied: names of tensors that must have the bytes of another tensor, if both come.
            expected_digest: the digest that the version must have. Its algorithm is used, whatever the delivery states.
            algorithm: the hash if there is no expected digest, and the delivery states none before its tensors. None:
                the default.
            places: the memory into which the tensors go, and in which they are yielded. None: each stays where it came.
            progress: counts the bytes as they come.
        """
        self.digest: str | None = None
        """The version's digest, once everything has arrived and is right."""
        self._delivery = delivery
        self._tied = tied or {}
        self._expected = expected_digest
        self._cancelled = cancelled
        self.digests: dict[str, str] = {}
        """The digest of each tensor that has come so far."""
        self._asked = algorithm
        self._places = places
        self._progress = progress or ReceivedBytes()
        self._stream = self._run()

    def __iter__(self) -> Iterator[tuple[str, HostTensor]]:
        return self._stream

    def check_stated(self) -> None:
        """Raises InvalidWeights if the delivery states another digest than the expected one, or if the model can't
        serve what it states. Reads no byte."""
        self._check_form()
        self._compare(self._delivery.digest, self._expected, "the delivery states")
        _check_ties(self._tied, self._delivery.tensor_digests or {})

    def _check_form(self) -> None:
        stated, digests = self._delivery.digest, self._delivery.tensor_digests
        if stated is not None and not re.fullmatch(DIGEST_PATTERN, stated):
            raise _refuse(f"the delivery states the version digest {stated[:80]!r}, which is none")
        if digests is not None and not are_digests(digests.values()):
            raise _refuse("the delivery states digests of tensors that are none, or of two algorithms")

    @property
    def _algorithm(self) -> DigestAlgorithm:
        """The hash of the version's digest, and of its tensors."""
        stated = self._expected or self._delivery.digest
        if stated is None and self._delivery.tensor_digests:
            stated = next(iter(self._delivery.tensor_digests.values()))
        return algorithm_of(stated) if stated is not None else self._asked or DEFAULT_ALGORITHM

    def finish(self) -> str:
        """Returns the digest after the engine has read the stream. EngineFailed if it did not read all of it."""
        if next(self._stream, None) is not None:  # an engine may count the tensors, and not ask for the end
            taken, total = len(self.digests) - 1, len(self._delivery.specs)
            raise EngineFailed(f"the engine took {taken} of {total} tensors, and did not ask for the rest")
        if self.digest is None:
            raise EngineFailed("the engine continued although the weights failed on their way")
        return self.digest

    def _run(self) -> Iterator[tuple[str, HostTensor]]:
        # Only the product's own deliveries are believed. Any other class, also a derived one, may state what it likes.
        believed = type(self._delivery).__module__.startswith("rl_plane.")
        self.check_stated()
        specs, stated, algorithm = self._delivery.specs, self._delivery.tensor_digests, self._algorithm
        if stated and algorithm_of(next(iter(stated.values()))) != algorithm:
            stated = None  # the expected digest, which is of another algorithm, covers every byte
        self._delivery.algorithm, self._delivery.places = algorithm, self._places
        for name, tensor in self._delivery.tensors(self._cancelled):
            self._progress.came(tensor.data.nbytes)
            if self._cancelled():
                raise EngineFailed("staging was cancelled")
            self._check(name, tensor, specs)
            placed = self._placed(name, tensor if believed else replace(tensor, digest=None), algorithm)
            digest = placed.digest or tensor_digest(placed.data, algorithm)
            if stated is not None and stated.get(name) != digest:
                raise _refuse(
                    f"{_short(name)} has digest {digest}, but its publisher stated {stated.get(name)}", tensor=name
                )
            self.digests[name] = digest
            yield name, replace(placed, digest=digest)
        missing = sorted(specs.keys() - self.digests.keys())
        if missing:
            raise _refuse("; ".join(_part("of the announced tensors did not arrive", missing, _short)))
        lines = [(name, specs[name], digest) for name, digest in self.digests.items()]
        computed = tensors_digest(lines, self._delivery.adapter_config_raw)
        self._check_form()  # the digest may have come last
        self._compare(computed, self._delivery.digest, "the bytes make")
        self._compare(computed, self._expected, "the bytes make")
        _check_ties(self._tied, self.digests)
        if self._cancelled():
            raise EngineFailed("staging was cancelled")
        self.digest = computed

    def _placed(self, name: str, tensor: HostTensor, algorithm: DigestAlgorithm) -> HostTensor:
        """Copies the tensor into its place, unless it lies there, and hashes what is copied."""
        place = self._places(name, tensor.spec) if self._places is not None else None
        if place is None:
            return tensor
        digest = tensor.digest
        if not is_same_memory(place, tensor.data):
            if digest is None:
                digest = copy_hashed(place, tensor.data, algorithm)
            else:
                copy(place, tensor.data)
        return HostTensor(tensor.spec, place, owned=True, digest=digest)

    def _check(self, name: str, tensor: HostTensor, specs: Mapping[str, TensorSpec]) -> None:
        if name not in specs:
            raise _refuse(f"{_short(name)} arrived, but was not announced", tensor=name)
        if name in self.digests:
            raise _refuse(f"{_short(name)} arrived twice", tensor=name)
        if tensor.spec != specs[name]:
            raise _refuse(f"{_short(name)} arrived as {tensor.spec}, but {specs[name]} was announced", tensor=name)
        if tensor.data.nbytes != tensor.spec.nbytes:
            raise _refuse(
                f"{_short(name)} arrived with {tensor.data.nbytes} bytes, not {tensor.spec.nbytes}", tensor=name
            )

    def _compare(self, digest: str | None, wanted: str | None, source: str) -> None:
        if digest is None or wanted is None or digest == wanted:
            return
        if algorithm_of(digest) == algorithm_of(wanted):
            raise _refuse(
                f"{source} version digest {digest}, but {wanted} is wanted",
                fix=f"{CHANGED_FIX}. If the update states a digest, state the one of these weights",
                digest=digest,
                expected_digest=wanted,
            )
        if self._expected is None:  # an expected digest of another algorithm covers every byte
            raise InvalidWeights(
                f"the weights were hashed by {algorithm_of(digest)}, and then came the digest {wanted}",
                field="digest_algorithm",
                fix=f"name it before the weights come: digest_algorithm {algorithm_of(wanted)}",
            )


def _refuse(what: str, *, tensor: str | None = None, fix: str = CHANGED_FIX, **facts: str) -> InvalidWeights:
    return InvalidWeights(
        what,
        field="transport",
        fix=fix,
        tensor=None if tensor is None else tensor[:SHOWN_CHARS],
        **facts,
    )


def receive(
    holder: WeightHolder,
    delivery: Delivery,
    *,
    kind: Kind = "base",
    cast: bool,
    expected_digest: str | None,
    algorithm: DigestAlgorithm | None = None,
    cancelled: Callable[[], bool],
    area: StagingArea,
    digests: dict[str, str] | None = None,
    progress: ReceivedBytes | None = None,
) -> tuple[Staged, str]:
    """Checks a delivery, stages it in `area` and verifies it. Returns the staged weights and the version's digest,
    which covers the config of an adapter too. `digests` takes each tensor's.

    Closes the delivery on every path. When it raises, nothing is staged, and the area is the caller's to close: wrong
    weights make the stream raise inside `holder.stage`. If a holder returns without asking for the stream's end, this
    frees the staged weights with their last reference.
    """
    with closing(delivery):
        stream = DigestingStream(
            delivery,
            tied=check_fits(holder, delivery, kind, cast),
            expected_digest=expected_digest,
            algorithm=algorithm,
            places=area.find,
            cancelled=cancelled,
            progress=progress,
        )
        if kind == "base":
            finished = _finished(holder.stage(stream, cancelled), stream)
        else:
            config = delivery.adapter_config
            assert config is not None, "an adapter's spec follows from its config"
            finished = _finished(holder.stage_adapter(config, stream, cancelled), stream)
        if digests is not None:
            digests.update(stream.digests)
        return finished


def _finished(staged: Staged, stream: DigestingStream) -> tuple[Staged, str]:
    try:
        return staged, stream.finish()
    except BaseException:
        del staged  # the traceback would hold the weights for as long as the error lives
        raise


def check_some(
    wanted: Mapping[str, TensorSpec], tied: Mapping[str, str], offered: Mapping[str, TensorSpec]
) -> None:
    """InvalidWeights unless `offered` are some of the tensors that the model needs. Reads no byte."""
    check_specs({name: spec for name, spec in wanted.items() if name in offered}, tied, offered, False, SOME_FIX)


def check_deltas(wanted: Mapping[str, TensorSpec], offered: Mapping[str, TensorSpec]) -> None:
    """InvalidWeights unless `offered` can be deltas of the `wanted` tensors. Reads no byte."""
    unknown = sorted(name for name in offered if name not in wanted)
    wrong = sorted(
        name for name, spec in offered.items() if name in wanted and not _may_be_delta(spec, wanted[name])
    )
    parts = [
        *_part("unknown to the model", unknown, _short),
        *_part("not the delta of their tensors (U8, one axis, not too long)", wrong, _short),
    ]
    if parts:
        raise InvalidWeights(
            f"the delta does not fit the model: {'; '.join(parts)}",
            field="transport",
            fix="encode it with rl_plane.weights.delta_codec from the committed version, or send encoding full",
        )


def _may_be_delta(spec: TensorSpec, of: TensorSpec) -> bool:
    longest = delta_codec.max_nbytes(of.nbytes, DTYPE_BYTES[of.dtype])
    return spec.dtype == "U8" and len(spec.shape) == 1 and spec.nbytes <= longest


def check_fits(holder: WeightHolder, delivery: Delivery, kind: Kind, cast: bool) -> Mapping[str, str]:
    """Checks before the first byte comes that the delivery has the tensors that the model needs. Returns the names that
    the model ties, as `tied_tensors`."""
    if kind == "base":
        tied = holder.tied_tensors()
        check_specs(holder.weight_spec(), tied, delivery.specs, cast)
        return tied
    if delivery.adapter_config is None:
        raise InvalidWeights(
            "base weights arrived, not an adapter", field="transport", fix="publish a PEFT adapter directory"
        )
    check_specs(holder.adapter_spec(delivery.adapter_config), {}, delivery.specs, cast, ADAPTER_FIX)
    return {}


def check_overwrite(holder: WeightHolder, delivery: Delivery, *, cast: bool, expected_digest: str | None) -> None:
    """Checks that the delivery has the tensors that the model needs, and states no other digest than the expected one.
    `overwrite` makes the same checks before it uses the engine."""
    tied = check_fits(holder, delivery, "base", cast)
    DigestingStream(delivery, tied=tied, expected_digest=expected_digest).check_stated()


def overwrite(
    holder: WeightHolder,
    delivery: Delivery,
    *,
    cast: bool,
    expected_digest: str | None,
    algorithm: DigestAlgorithm | None = None,
    cancelled: Callable[[], bool],
    progress: ReceivedBytes | None = None,
) -> str:
    """Checks a delivery and writes it over the served weights. Returns the version's digest.

    Closes the delivery on every path. Checks that need no byte come before the first use of the engine. After that, any
    error leaves the engine with weights of no version; a wrong digest, found at the end, is InvalidWeights too.
    """
    with closing(delivery):
        stream = DigestingStream(
            delivery,
            tied=check_fits(holder, delivery, "base", cast),
            expected_digest=expected_digest,
            algorithm=algorithm,
            cancelled=cancelled,
            progress=progress,
        )
        stream.check_stated()
        holder.overwrite(stream, cancelled)
        return stream.finish()


def model_digest(
    directory: Path, tied: Mapping[str, str] | None = None, algorithm: DigestAlgorithm = DEFAULT_ALGORITHM
) -> str:
    """Returns the version digest of a model directory's safetensors files. Reads their bytes, in bounded memory, even
    if there is a manifest.

    `tied`: the ties of the engine that has loaded the directory; InvalidWeights if the engine serves other weights than
    the digest says."""
    with closing(open_checkpoint(directory, field="model")) as checkpoint:
        _check_ties(tied or {}, checkpoint.specs, "model", OWN_TIE_FIX)
        digests = checkpoint.tensor_digests(algorithm)
        _check_ties(tied or {}, digests, "model", OWN_TIE_FIX)
        return checkpoint.digest_of(digests)


def adapter_digest(directory: Path, algorithm: DigestAlgorithm = DEFAULT_ALGORITHM) -> str:
    """Returns the version digest of a PEFT adapter directory, which covers its config."""
    with closing(open_checkpoint(directory, field="directory", kind="lora")) as checkpoint:
        return checkpoint.digest(algorithm)
