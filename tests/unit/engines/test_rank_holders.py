"""The holders of a rank's weights in the engines' processes, with stand-ins for the engines and for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_plane._util.tasks import never
from rl_plane.errors import InvalidWeights, Unsupported
from rl_plane.transports.base import Delivery, TransportContext
from rl_plane.transports.filesystem.receiver import FilesystemTransport
from tests.support.hf_runs import checkpoint
from worker.engines.common.checkpoint_spec import CheckpointSpec, checkpoint_spec
from worker.engines.common.rank_holder import RankHolder
from worker.engines.sglang.holder import SglangHolder
from worker.engines.vllm.holder import VllmHolder
from worker.receive.host_agent.holder import HostHolder
from worker.receive.rank_agents.model_description import ModelDescription
from worker.receive.staging import TIE_FIX, receive
from worker.receive.staging_area import MappedArea, StagingArea
from worker.testing.tiny_model import make_tiny_model

GPU = torch.device("cuda", 1)


class Model(torch.nn.Linear):  # type: ignore[misc]
    """Puts what it loads in the place of what it had, as a layer does that quantizes its weights."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.loads: Callable[[dict[str, torch.Tensor]], None] = self.put

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads(dict(tensors))


class Runner:
    """A model runner that stands in for either engine's."""

    def __init__(self, device: torch.device) -> None:
        self.model, self.device, self.weight_updater = Model(), device, self
        self.model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.server_args = SimpleNamespace(enable_lora=False)

    def reload_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(weights_iterator)

    def get_model(self) -> Model:
        return self.model

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self, run_post_load: bool) -> None: ...


def accept(runner: Any) -> None: ...


def refuse(runner: Any) -> None:
    raise Unsupported("SGLang refuses weight updates", field="engine", fix="start it otherwise")


@pytest.fixture(autouse=True)
def _sglang_takes_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.sglang.holder.check_updates", accept)


def holder_of(kind: str, directory: Path, runner: Runner, **shape: int) -> Any:
    model = make_tiny_model(directory / "model", 1, "bfloat16", **shape)
    if kind == "vllm":
        return VllmHolder(model, directory, runner, False, {})
    updater = SimpleNamespace(_select_runners=lambda: [("target", runner)])
    tp_worker = SimpleNamespace(model_runner=runner)
    return SglangHolder(model, SimpleNamespace(tp_worker=tp_worker, weight_updater=updater))


def save_config(directory: Path, **options: Any) -> None:
    from transformers import Qwen3Config

    Qwen3Config(**options).save_pretrained(directory)


def loaded(holder: RankHolder, runner: Runner, delivery: Delivery, cast: bool = False) -> dict[str, torch.Tensor]:
    """The tensors that the rank's engine loads, after the host agent has staged them."""
    host = HostHolder(Path(), ModelDescription(holder.spec.tensors, holder.spec.tied, ("cpu",)))
    area = StagingArea.for_specs(delivery.specs, shared=True)
    receive(host, delivery, cast=cast, expected_digest=None, cancelled=never, area=area)
    holder.take(MappedArea(area.descriptor, area.layout))
    area.close()
    found: dict[str, torch.Tensor] = {}
    runner.model.loads = lambda tensors: found.update((name, one.clone()) for name, one in tensors.items())
    assert holder.swap(), "something refers to the map still"
    return found


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_check_is_of_what_the_last_load_has_put_in_place(tmp_path: Path, kind: str) -> None:
    runner = Runner(torch.device("cpu"))
    holder, first = holder_of(kind, tmp_path, runner), runner.model.weight.detach().clone()

    def load(tensors: dict[str, torch.Tensor]) -> None:
        runner.model.loads = lambda _: runner.model.put(tensors)
        holder.overwrite(checkpoint(tmp_path / "model"), never)

    before = holder.checks.checksum()
    holder.checks.snapshot()
    load({"weight": first + 1})
    assert holder.checks.checksum() != before
    assert holder.checks.compare() == ["weight"]
    load({"weight": first, "scale": torch.ones(1)})
    assert holder.checks.compare() == ["scale"]
    del runner.model.scale
    assert (holder.checks.checksum(), holder.checks.compare()) == (before, [])
    del runner.model.bias
    assert holder.checks.compare() == ["bias"]


def test_sglang_is_asked_before_the_first_byte_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.sglang.holder.check_updates", refuse)
    runner = Runner(torch.device("cpu"))
    runner.model.loads = lambda tensors: pytest.fail("it loads")
    holder = holder_of("sglang", tmp_path, runner)
    before = holder.checks.checksum()
    area = StagingArea.for_specs(holder.spec.tensors, shared=True)
    holder.take(MappedArea(area.descriptor, area.layout))
    with pytest.raises(Unsupported):
        holder.swap()
    with pytest.raises(Unsupported):
        holder.overwrite(checkpoint(tmp_path / "model"), never)
    assert holder.checks.checksum() == before
    area.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_weights_are_written_on_the_ranks_own_gpu_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """This also holds where the agent's thread writes."""
    calls: list[tuple[str, Any]] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        calls.append(("on", device))
        yield
        calls.append(("off", device))

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: calls.append(("settled", device)))
    runner = Runner(GPU)
    runner.model.parameters = lambda: iter([SimpleNamespace(device=GPU)])
    holder: RankHolder = holder_of(kind, tmp_path, runner)
    runner.model.loads = lambda tensors: calls.append(("load", sorted(tensors)))

    def written(names: list[str]) -> list[tuple[str, Any]]:
        return [("on", GPU), ("settled", GPU), ("load", names), ("settled", GPU), ("off", GPU)]

    whole = written(sorted(holder.spec.tensors))
    area = StagingArea.for_specs(holder.spec.tensors, shared=True)
    for name, tensor in checkpoint(tmp_path / "model"):
        area.put(name, tensor)
    holder.take(MappedArea(area.descriptor, area.layout))
    assert holder.swap(), "something refers to the map still"
    assert calls == whole
    held: list[Any] = []
    runner.model.loads = lambda tensors: held.append(tensors)
    holder.take(MappedArea(area.descriptor, area.layout))
    assert not holder.swap(), "a model that holds what it has loaded holds the memory"
    runner.model.loads = lambda tensors: calls.append(("load", sorted(tensors)))
    calls.clear()
    holder.overwrite(checkpoint(tmp_path / "model"), lambda: False)
    assert calls == whole


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_tensors_that_the_config_ties_are_accepted_only_if_they_are_equal(tmp_path: Path, kind: str) -> None:
    runner = Runner(torch.device("cpu"))
    holder = holder_of(kind, tmp_path, runner, tie_word_embeddings=True)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    assert holder.spec.tied == {head: embedding}
    assert head not in holder.spec.tensors
    transport = FilesystemTransport(TransportContext((tmp_path,)))
    tensors = load_file(tmp_path / "model" / "model.safetensors")

    def send(name: str, given: torch.Tensor) -> dict[str, torch.Tensor]:
        path = tmp_path / name
        path.mkdir()
        save_file({**tensors, head: given}, path / "model.safetensors")
        return loaded(holder, runner, transport.open({"backend": "filesystem", "path": str(path)}, "base"))

    assert send("both", tensors[embedding].clone()).keys() == holder.spec.tensors.keys()
    for name, wrong in {"bytes": tensors[embedding] + 1, "shape": torch.zeros(3, 3)}.items():
        with pytest.raises(InvalidWeights, match=f"to '{embedding}', but they differ") as caught:
            send(name, wrong)
        assert (caught.value.facts["field"], caught.value.facts["fix"]) == (head, TIE_FIX)


@pytest.mark.parametrize(
    ("names", "embedding"),
    [
        (["transformer.wte.weight", "transformer.wpe.weight"], "transformer.wte.weight"),
        (["backbone.embeddings.weight"], "backbone.embeddings.weight"),
        (["model.layers.9.embed_tokens.weight", "model.embed_tokens.weight"], "model.embed_tokens.weight"),
        (
            ["vision.patch_embeddings.weight", "language_model.model.embed_tokens.weight"],
            "language_model.model.embed_tokens.weight",
        ),
        (["encoder.tokens.weight"], ""),
    ],
)
def test_the_embedding_has_the_name_that_the_checkpoint_gives_it(
    tmp_path: Path, names: list[str], embedding: str
) -> None:
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    save_config(tmp_path, tie_word_embeddings=True)
    assert checkpoint_spec(tmp_path, "BF16", {}).tied == {"lm_head.weight": embedding}


def test_the_head_may_be_in_a_part_of_the_model(tmp_path: Path) -> None:
    names = ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight", "mtp.lm_head.weight")
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    save_config(tmp_path, tie_word_embeddings=True)
    spec = checkpoint_spec(tmp_path, "BF16", {})
    assert spec.tied == dict.fromkeys(("lm_head.weight", names[1]), names[0])
    assert spec.tensors.keys() == {names[0], names[2]}


def spec_of(directory: Path, saved: dict[str, torch.dtype], dtype: str, engine: dict[str, str]) -> CheckpointSpec:
    directory.mkdir()
    save_file({name: torch.zeros(1, dtype=each) for name, each in saved.items()}, directory / "model.safetensors")
    save_config(directory)
    return checkpoint_spec(directory, dtype, engine)


def test_a_tensor_has_the_type_in_which_the_engine_keeps_it(tmp_path: Path) -> None:
    saved = {"weight": torch.bfloat16, "head": torch.bfloat16, "router": torch.bfloat16, "bias": torch.float32}
    renamed = {"old.bias": torch.float32, "count": torch.int64}
    engine = {"weight": "BF16", "router": "F32", "bias": "F32", "new.bias": "F32"}
    as_saved = spec_of(tmp_path / "as saved", {**saved, **renamed}, "BF16", engine)
    types = {name: spec.dtype for name, spec in as_saved.tensors.items()}
    assert types == {
        "weight": "BF16",
        "head": "BF16",
        "router": "BF16",  # the start directory has it so, and must be accepted
        "bias": "F32",
        "old.bias": "F32",
        "count": "I64",
    }
    assert as_saved.own == {"router": "F32"}
    other = spec_of(tmp_path / "other", dict.fromkeys((*saved, "old.bias"), torch.float32), "BF16", engine)
    types = {name: spec.dtype for name, spec in other.tensors.items()}
    assert types == {"weight": "BF16", "head": "BF16", "router": "F32", "bias": "F32", "old.bias": "BF16"}
    assert other.own == {}


def test_vllm_takes_the_types_that_its_load_has_shown(tmp_path: Path) -> None:
    """A parameter has another name in vLLM, and one under an adapter has another name yet."""
    name = "model.layers.0.mlp.up_proj.weight"
    model = make_tiny_model(tmp_path / "model", 1, "float32")
    holder = VllmHolder(model, tmp_path, Runner(torch.device("cpu")), True, {name: torch.float32})
    assert {key for key, spec in holder.spec.tensors.items() if spec.dtype == "F32"} == {name}


def test_a_model_whose_derived_weights_would_stay_is_refused(tmp_path: Path) -> None:
    runner = Runner(torch.device("cpu"))
    runner.model.process_weights_after_loading = lambda: None
    with pytest.raises(Unsupported, match="derives weights of Model") as caught:
        holder_of("vllm", tmp_path, runner)
    assert caught.value.facts["field"] == "model"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_cast_rounds_nothing_that_the_engine_keeps(tmp_path: Path, kind: str) -> None:
    """A float64 that float32 holds exactly, and bfloat16 does not."""
    router, other = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    runner = Runner(torch.device("cpu"))
    kept = {router: torch.zeros(1, dtype=torch.float32), other: torch.zeros(1, dtype=torch.bfloat16)}
    runner.model.state_dict = lambda: kept
    holder = holder_of(kind, tmp_path, runner)
    assert holder.spec.tensors[router].dtype == "BF16"
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    exact = 1.0 + 2.0**-20
    (tmp_path / "new").mkdir()
    wide = {name: torch.full_like(tensors[name], exact, dtype=torch.float64) for name in (router, other)}
    save_file({**tensors, **wide}, tmp_path / "new" / "model.safetensors")
    delivery = FilesystemTransport(TransportContext((tmp_path,))).open(
        {"backend": "filesystem", "path": str(tmp_path / "new")}, "base"
    )
    tensors = loaded(holder, runner, delivery, cast=True)
    assert tensors[router].dtype == torch.float32
    assert (tensors[router] == exact).all()
    assert tensors[other].dtype == torch.bfloat16
