"""Sources: names, ties, dtypes and order; sharded weights on two real ranks."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_plane.errors import InvalidRequest, InvalidWeights
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.publish.host_copy import HostCopy
from rl_plane.publish.sources.adapter import AdapterSource
from rl_plane.publish.sources.base import Taken, WeightSource
from rl_plane.publish.sources.directory import DirectorySource
from rl_plane.publish.sources.export import ExportSource
from rl_plane.publish.sources.module import ModuleSource, peft_base_name
from rl_plane.publish.sources.source_choice import as_source
from rl_plane.publish.sources.state_dict import StateDictSource
from rl_plane.transports.packing import fill
from rl_plane.weights.manifest import Manifest, pack
from tests.support.paths import ROOT
from tests.support.scripts import told_by_ranks
from tests.support.sharded_sources import Tied, fresh, lora
from worker.engines.fake.adapter import make_fake_model
from worker.receive.staging import adapter_digest, model_digest
from worker.testing.tiny_adapter import make_tiny_adapter
from worker.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

RANKS_S = 300.0
"""Two processes that import torch beside other tests."""


def digest_of(taken: Taken) -> str:
    """Returns the digest that a receiver computes, over several small buckets."""
    manifest = Manifest(pack(taken.specs, 4096), taken.adapter_config)
    digests: dict[str, str] = {}
    sizes = [bucket.nbytes for bucket in manifest.buckets]
    for _ in fill(manifest, taken.tensors, lambda number: memoryview(bytearray(sizes[number])), digests):
        pass
    taken.close()
    digest = manifest.digested(digests).digest
    assert digest is not None
    return digest


def names_of(source: WeightSource) -> list[str]:
    return [name for name, _ in source.take().specs]


def test_a_model_gives_what_its_checkpoint_holds(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_tiny_model(tmp_path / "model", 1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert digest_of(ModuleSource(model).take()) == model_digest(path)
    assert digest_of(as_source(model.state_dict()).take()) == model_digest(path)
    assert digest_of(as_source(path).take()) == model_digest(path)
    half = make_tiny_model(tmp_path / "half", 1, "bfloat16")
    assert digest_of(ModuleSource(model, dtype=torch.bfloat16).take()) == model_digest(half)
    with torch.no_grad():
        model.model.norm.weight += 1
    assert digest_of(ModuleSource(model).take()) != model_digest(path)


def test_tied_weights_come_once_and_wrappers_have_no_names() -> None:
    expected = ["narrow", "scale", "embed.weight"]
    assert names_of(ModuleSource(fresh()))[:3] == expected
    assert "head.weight" not in names_of(ModuleSource(fresh()))
    assert names_of(StateDictSource(fresh().state_dict())) == names_of(ModuleSource(fresh()))
    inside = fresh()
    inside.layers[1] = compiled(inside.layers[1])
    assert names_of(as_source(inside)) == names_of(ModuleSource(fresh()))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")  # nothing is run


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("order", ["compiled", "ddp", "compiled ddp", "ddp compiled", "compiled ddp compiled"])
def test_wrappers_of_a_model_are_removed_in_any_order(order: str) -> None:
    """The first word names the outermost wrapper."""
    around = {"compiled": compiled, "ddp": torch.nn.parallel.DistributedDataParallel}

    def wrapped(model: Any) -> Any:
        for each in reversed(order.split()):
            model = around[each](model)
        return model

    for plain, kind in ((fresh(), ModuleSource), (lora(), AdapterSource)):
        source = as_source(wrapped(plain))
        assert type(source) is kind
        assert digest_of(source.take()) == digest_of(kind(plain).take())


def test_an_adapter_of_a_compiled_base_model_is_one() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(compiled(fresh()), LoraConfig(r=2, target_modules=["0", "1", "2"]))
    source = as_source(model)
    assert source.adapter
    assert names_of(source) == names_of(as_source(lora()))


@pytest.fixture
def own_adapter(tmp_path: Path) -> Any:
    """Adds an adapter to a model of transformers without a PeftModel around it, and saves it by transformers."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "model", 1), dtype=torch.float32)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), "own")
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path / "saved")
    return model


def test_an_adapter_of_transformers_own_is_as_transformers_saves_it(tmp_path: Path, own_adapter: Any) -> None:
    taken = AdapterSource(own_adapter, "own").take()
    saved = DirectorySource(tmp_path / "saved").take()
    assert dict(taken.specs) == dict(saved.specs)
    assert all(name.startswith("base_model.model.model.layers.") for name, _ in taken.specs)
    given = {name: bytes(tensor.data) for name, tensor in saved.tensors if isinstance(tensor, HostTensor)}
    saved.close()
    for name, tensor in taken.tensors:
        assert tensor.numpy().tobytes() == given.pop(name)  # type: ignore[union-attr]
    assert not given


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_base_of_a_model_with_an_adapter_is_published_by_names(
    tmp_path: Path, own_adapter: Any, wrapped: bool
) -> None:
    """The names are those of the error's fix and of the docs; the adapter is merged or left out."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    path, model = tmp_path / "model", own_adapter
    if wrapped:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with pytest.raises(InvalidRequest, match="PEFT's layers") as caught:
        ModuleSource(model)
    assert caught.value.facts["field"] == "names"
    with pytest.raises(InvalidRequest, match="keeps PEFT's names") as not_so:
        as_source(model, names={})
    assert "ModuleSource(model, names=peft_base_name)" in not_so.value.facts["fix"]
    assert "names=rl_plane.publish.peft_base_name" in caught.value.facts["fix"]
    assert "`ModuleSource(model, names=peft_base_name)`" in (ROOT / "docs" / "publishing.md").read_text()
    source = ModuleSource(model, names=peft_base_name)
    assert digest_of(source.take()) == model_digest(path)
    if wrapped:
        plain = copy.deepcopy(model).merge_and_unload()
        model.merge_adapter()
        assert digest_of(source.take()) == digest_of(ModuleSource(plain).take()) != model_digest(path)


def test_only_floating_tensors_are_converted() -> None:
    state = {"weight": torch.zeros(2, 3), "count": torch.zeros((), dtype=torch.int64)}
    taken = StateDictSource(state, dtype=torch.bfloat16).take()
    assert dict(taken.specs) == {"weight": TensorSpec("BF16", (2, 3)), "count": TensorSpec("I64", ())}
    assert [tensor.dtype for _, tensor in taken.tensors] == [torch.bfloat16, torch.int64]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"a": "x"}, ["x", "b"]),
        (lambda name: f"model.{name}", ["model.a", "model.b"]),
        (lambda name: None if name == "a" else name, ["b"]),
    ],
)
def test_names_are_mapped(names: Any, expected: list[str]) -> None:
    state = {"a": torch.zeros(2), "b": torch.ones(3)}
    assert names_of(as_source(state, names=names)) == expected
    assert names_of(as_source(lambda: iter(state.items()), names=names)) == expected


@pytest.mark.parametrize(
    ("names", "words"),
    [({"a": "b"}, "two tensors"), ({"a": "with space"}, "can't be the name"), (lambda name: None, "no tensors")],
)
def test_names_that_can_not_be_are_refused(names: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        as_source({"a": torch.zeros(2), "b": torch.ones(3)}, names=names).take()
    assert caught.value.facts["fix"]


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(3, device="meta"), "'odd' is on the meta device"),
        (torch.eye(3).to_sparse(), "'odd' is laid out as torch.sparse_coo"),
        (torch.nn.UninitializedParameter(), "'odd' is not initialised"),
        (torch.zeros(3, dtype=torch.complex64), "'odd' is of torch.complex64"),
    ],
)
def test_a_tensor_that_can_not_be_read_is_refused_by_its_name(tensor: Any, words: str, exported: bool) -> None:
    """The error comes before the fleet hears of the update. Tensors that are left out cause none."""
    state = {"weight": torch.zeros(2), "odd": tensor}
    given: Any = state.items if exported else state
    with pytest.raises(InvalidRequest, match=words) as caught:
        as_source(given).take()
    assert caught.value.facts["field"] == "source"
    assert caught.value.facts["fix"]
    assert names_of(as_source(given, names=lambda name: None if name == "odd" else name)) == ["weight"]


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize(
    ("name", "names", "field", "words"),
    [
        (7, None, "source", "called 7"),
        ("weight", lambda name: 7, "names", "'weight' becomes 7"),
        ("weight", {"weight": 7}, "names", "'weight' becomes 7"),
    ],
)
def test_names_are_words(name: Any, names: Any, field: str, words: str, exported: bool) -> None:
    state = {name: torch.zeros(2)}
    given: Any = state.items if exported else state
    with pytest.raises(InvalidRequest, match=words) as caught:
        as_source(given, names=names).take()
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


def test_an_export_that_turns_unreadable_is_refused() -> None:
    weights = iter([torch.eye(3), torch.eye(3), torch.eye(3).to_sparse()])
    source = ExportSource(lambda: [("weight", next(weights))])
    digest_of(source.take())
    with pytest.raises(InvalidRequest, match="'weight' is laid out as"):
        digest_of(source.take())


def test_an_export_gives_tensors() -> None:
    with pytest.raises(InvalidRequest, match="'weight' is a list"):
        ExportSource(lambda: [("weight", [1.0])]).take()


def test_other_ranks_may_describe_without_data() -> None:
    source = ExportSource(lambda: [("weight", torch.empty(3, device="meta"))], collective=True)
    assert dict(source.take().specs) == {"weight": TensorSpec("F32", (3,))}
    with pytest.raises(InvalidRequest, match="'weight' is on the meta device"):  # on rank 0 it is read
        digest_of(source.take())


def test_an_export_is_made_once_for_each_version() -> None:
    made: list[int] = []

    def export() -> Iterator[tuple[str, Any]]:
        made.append(len(made))
        for index in range(3):
            yield f"layer.{index}", torch.full((4,), float(made[-1]))

    source = ExportSource(export, dtype=torch.bfloat16)
    first = digest_of(source.take())
    assert len(made) == 2  # names and shapes had to be learnt
    assert digest_of(source.take()) != first
    assert len(made) == 3
    told = ExportSource(export, specs=[(f"layer.{index}", TensorSpec("F32", (4,))) for index in range(3)])
    digest_of(told.take())
    assert len(made) == 4


def test_an_export_that_changes_its_tensors_is_refused() -> None:
    shapes = iter([2, 2, 3])
    source = ExportSource(lambda: [("weight", torch.zeros(next(shapes)))])
    digest_of(source.take())
    with pytest.raises(InvalidRequest, match="with another dtype or shape"):
        digest_of(source.take())


@pytest.mark.parametrize("copied", [False, True])
def test_an_export_that_grows_is_refused(copied: bool) -> None:
    """The tensors are packed, or read into the publisher's copy, which stays at the version before."""
    count, copy = 2, HostCopy()

    def export() -> Iterator[tuple[str, Any]]:
        for index in range(count):
            weight = torch.ones(64)
            weight[0] = count
            yield f"layer.{index}", weight

    source = ExportSource(export)
    read = copy.read if copied else digest_of
    read(source.take())
    before, count = copy.digest, 3
    with pytest.raises(InvalidRequest, match=r"expected nothing next, but 'layer\.2' came"):
        read(source.take())
    assert copy.digest == before


def test_an_adapter_is_what_peft_saves(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "model", 1))
    config = LoraConfig(
        r=4,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        use_dora=True,
        rank_pattern={"v_proj": 2},
        bias="all",
        modules_to_save=["lm_head"],
    )
    model = get_peft_model(base, config)
    model.save_pretrained(tmp_path / "saved")
    assert digest_of(AdapterSource(model).take()) == adapter_digest(tmp_path / "saved")
    assert as_source(model).adapter
    assert digest_of(as_source(model).take()) == adapter_digest(tmp_path / "saved")
    assert model.peft_config["default"].inference_mode is False
    with pytest.raises(InvalidRequest, match="no adapter 'other'"):
        AdapterSource(model, "other")
    with pytest.raises(InvalidRequest, match="no adapter"):
        AdapterSource(fresh())


def test_a_directory_source_has_the_digest_of_its_files(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", 2)
    adapter = make_tiny_adapter(model, tmp_path / "adapter", 1)
    assert digest_of(DirectorySource(adapter).take()) == adapter_digest(adapter)
    assert DirectorySource(adapter).adapter
    fake = make_fake_model(tmp_path / "fake", 3)
    assert digest_of(DirectorySource(fake).take()) == model_digest(fake)
    assert digest_of(DirectorySource(fake / "model.safetensors").take()) == model_digest(fake)
    with pytest.raises(InvalidRequest, match="not there"):
        DirectorySource(tmp_path / "nowhere").take()
    with pytest.raises(InvalidWeights, match="neither"):
        DirectorySource(tmp_path).take()


def test_directories_need_no_torch(tmp_path: Path) -> None:
    fake = make_fake_model(tmp_path / "fake", 3)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from rl_plane.publish.sources.source_choice import as_source\n"
        f"print(len(list(as_source({str(fake)!r}).take().tensors)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.parametrize("what", [7, None, [("a", 1)], torch.zeros(3)])
def test_an_object_that_is_no_source_is_refused(what: Any) -> None:
    with pytest.raises(InvalidRequest, match="can't be taken"):
        as_source(what)


def test_options_that_a_source_has_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="as it is"):
        as_source(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(InvalidRequest, match="belong to the source"):
        as_source(ModuleSource(Tied()), dtype=torch.bfloat16)
    with pytest.raises(InvalidRequest, match="PEFT's names"):
        as_source(lora(), names={"a": "b"})


FSDP = ["fsdp2", "fsdp2_after_forward", "fsdp2_bf16", "fsdp2_state_dict", "fsdp2_lora"]
FSDP1 = ["fsdp1", "fsdp1_orig_params", "fsdp1_mixed_precision", "fsdp1_state_dict", "fsdp1_lora"]
HYBRID = ["fsdp1_hybrid", "fsdp1_hybrid_state_dict"]
ZERO = ["zero3", "zero3_lora"]


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(2, [*FSDP, *FSDP1]), (4, HYBRID), (2, ZERO)],
    ids=["fsdp", "hybrid", "zero3"],
)
@pytest.mark.timeout(RANKS_S + 30)
def test_sharded_weights_are_gathered_on_several_ranks(ranks: int, kinds: list[str]) -> None:
    deepspeed = Path(sys.prefix) / "deepspeed"
    if kinds is ZERO and not deepspeed.is_dir():
        pytest.skip("deepspeed not installed: make engines")
    environ = {"DS_ACCELERATOR": "cpu"}
    if kinds is ZERO:
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(deepspeed)])
    told = told_by_ranks(ranks, "tests.support.sharded_sources", *kinds, timeout_s=RANKS_S, **environ)
    assert [one["kind"] for one in told] == kinds
    for one in told:
        assert one["same"], one
        assert len(one["names"]) == len(set(one["names"])) > 3
        assert not any("head" in name for name in one["names"])
