"""LoRA in the `hf` engine, held against PEFT's own model; and weights that are overwritten in place."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_plane.errors import EngineFailed, InvalidRequest, InvalidWeights, Unsupported
from rl_plane.protocol.versions import HostTensor
from tests.support.engine_runs import adapter_version, unload_adapter
from tests.support.hf_runs import (
    BOUND_S,
    NAMES_OF_STAGINGS,
    Run,
    ask,
    assert_greedy,
    checkpoint,
    freeze_after,
    given_prompt_logprobs,
    plain_logprobs,
    plain_prompt_logprobs,
    prompt_of,
    run,
    stage,
    version,
    witnessed,
)
from tests.support.moe import make_qwen_moe
from tests.support.receive_requests import NamedRequest, files_request
from worker.engines.base import EngineOptions
from worker.receive.staging import adapter_digest
from worker.receive.weight_holder import TensorStream
from worker.testing.tiny_adapter import make_tiny_adapter, make_witness_adapter, witness_adapter_next_token
from worker.testing.tiny_model import make_tiny_model, make_witness_model

if TYPE_CHECKING:
    from worker.engines.hf.adapter import HfEngine

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

Start = Callable[..., Awaitable["HfEngine"]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf-adapters")


@pytest.fixture(scope="module")
def tiny(root: Path) -> Path:
    return make_tiny_model(root / "tiny", seed=1)


def load_plain(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True).eval()


@pytest.fixture(scope="module")
def made_by_peft(root: Path, tiny: Path) -> dict[str, Path]:
    """Two adapters as a trainer saves them, of other ranks, scalings and modules."""
    import peft

    configs = {
        "one": peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"]),
        "two": peft.LoraConfig(r=8, lora_alpha=8, use_rslora=True, target_modules="all-linear"),
    }
    paths: dict[str, Path] = {}
    for name, config in configs.items():
        config.init_lora_weights = False
        torch.manual_seed(len(paths))
        model = peft.get_peft_model(load_plain(tiny), config)
        paths[name] = root / f"peft-{name}"
        model.save_pretrained(paths[name], save_embedding_layers=False)
    return paths


@pytest.fixture(scope="module")
def plain(tiny: Path, made_by_peft: dict[str, Path]) -> dict[str | None, Any]:
    from peft import PeftModel

    models = {name: PeftModel.from_pretrained(load_plain(tiny), path) for name, path in made_by_peft.items()}
    return {None: load_plain(tiny), **{name: model.eval() for name, model in models.items()}}


@pytest.fixture(scope="module")
def witnesses(root: Path) -> dict[int, Path]:
    return {seed: make_witness_model(root / f"witness-{seed}", seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def adapters(root: Path, witnesses: dict[int, Path]) -> dict[int, Path]:
    return {seed: make_witness_adapter(witnesses[1], root / f"adapter-{seed}", seed) for seed in (1, 2, 3)}


@pytest.fixture
async def start(root: Path) -> AsyncIterator[Start]:
    from worker.engines.hf.adapter import HfEngine  # it imports transformers

    engines: list[HfEngine] = []

    async def start_one(model: Path, dtype: str | None = None, **extra: int) -> HfEngine:
        arguments = {key: str(value) for key, value in extra.items()}
        engine = HfEngine(EngineOptions(model, dtype, extra=arguments, weight_roots=(root,)))
        engines.append(engine)
        await engine.start()
        engine.set_version(version(0))
        return engine

    yield start_one
    for engine in engines:
        await engine.close()


def reception(path: Path, **more: Any) -> NamedRequest:
    return files_request(next(NAMES_OF_STAGINGS), path, **more)


async def staged_adapter(engine: HfEngine, path: Path, cast: bool = False) -> str:
    what = reception(path, kind="lora", cast=cast)
    engine.receiver.open(*what)
    reply = await asyncio.to_thread(engine.receiver.receive, what.staging, lambda: False)
    assert reply["digest"] == adapter_digest(path)
    return what.staging


async def write_over(engine: HfEngine, tensors: TensorStream) -> None:
    await asyncio.to_thread(engine.holder.overwrite, tensors, lambda: False)


async def load(engine: HfEngine, name: str, path: Path, sequence: int = 1, cast: bool = False) -> None:
    staged = await staged_adapter(engine, path, cast)
    await engine.pause("keep", False)
    assert await engine.swap_adapter(name, staged, adapter_version(sequence, path)) is False
    await engine.resume()


def adapter_chain(seed: int, token: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        token = witness_adapter_next_token(seed, token)
        tokens.append(token)
    return tokens


# what is generated


async def test_a_mixed_batch_is_what_peft_makes_of_each(
    start: Start, tiny: Path, made_by_peft: dict[str, Path], plain: dict[str | None, Any]
) -> None:
    # Small steps: prompts are prefilled in parts.
    engine = await start(tiny, max_batch_tokens=24, page_size=8, num_blocks=128)
    for adapter, path in made_by_peft.items():
        await load(engine, adapter, path)
    names: list[str | None] = [None, "one", "two"]
    common = prompt_of(9, 40)
    requests = [(name, [*common, *prompt_of(n, 3 + n)]) for n in range(3) for name in names]
    results = await asyncio.gather(
        *(run(engine, ask(prompt, adapter=name, logprobs=True)) for name, prompt in requests)
    )
    for (name, prompt), result in zip(requests, results, strict=True):
        assert_greedy(plain[name], prompt, result.tokens)
        assert result.logprobs == pytest.approx(plain_logprobs(plain[name], prompt, result.tokens), abs=1e-4)
    assert len({tuple(result.tokens) for result in results[:3]}) == 3  # the adapters matter


async def test_an_adapter_may_name_more_modules_than_peft_lists(start: Start, root: Path) -> None:
    """PEFT replaces 20 or more names by shorter names with the same meaning."""
    from peft import PeftModel

    deep = make_tiny_model(root / "deep", seed=1, num_hidden_layers=5, hidden_size=64)
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    paths = [
        make_tiny_adapter(deep, root / f"deep-{seed}", seed, targets=targets)
        for seed, targets in enumerate((every, every[1:6], every))
    ]
    engine, prompt = await start(deep), prompt_of(3, 20)
    for number, path in enumerate(paths):
        await load(engine, f"a{number % 2}", path, sequence=number)
    for number in (1, 2):
        result = await run(engine, ask(prompt, adapter=f"a{number % 2}", logprobs=True))
        model = PeftModel.from_pretrained(load_plain(deep), paths[number]).eval()
        assert result.logprobs == pytest.approx(plain_logprobs(model, prompt, result.tokens), abs=1e-4)


KINDS: dict[str, dict[str, Any]] = {
    "dora": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
    "experts": {
        "target_modules": ["v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 2},
    },
    "other experts": {"target_modules": ["gate"], "target_parameters": ["experts.down_proj"]},
    "patterns": {
        "target_modules": r".*\.[qkv]_proj",
        "exclude_modules": ["k_proj"],
        "rank_pattern": {r"layers\.1\..*q_proj": 6},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 32},
        "use_rslora": True,
    },
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"], "lora_bias": True},
    "biases": {"target_modules": ["q_proj"], "bias": "all", "trainable_token_indices": [7, 9]},
}
"""PEFT's settings that change the numbers. Their adapters meet in one engine."""


def adapter_by_peft(model: Path, path: Path, seed: int, **settings: Any) -> Path:
    """Saves an adapter of this kind in which every tensor differs from the base model's."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, **settings)
    trained = peft.get_peft_model(load_plain(model), config)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    trained.save_pretrained(path, save_embedding_layers=False)
    return path


def adapter_of_single_experts(model: Path, path: Path, merged: Path) -> Path:
    """Saves an adapter as transformers 4 trained it, with a linear layer for each expert. `merged`: gets the model to
    which the adapter's deltas are added by hand."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(shutil.copytree(model, merged) / "model.safetensors")
    made: dict[str, torch.Tensor] = {}
    ends, r = ("gate_proj", "up_proj", "down_proj", "q_proj"), 3
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if module.endswith(ends) and weight.dim() == 2:
            a, b = 0.1 * torch.randn(r, weight.shape[1]), 0.1 * torch.randn(weight.shape[0], r)
            made |= {f"base_model.model.{module}.lora_{one}.weight": two for one, two in (("A", a), ("B", b))}
            tensors[name] = weight + 2.0 * b @ a
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    path.mkdir()
    save_file(made, path / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": r, "lora_alpha": 2 * r, "target_modules": list(ends)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


# PEFT warns of patterns of parameters, which it uses, and of biases, which have one dimension.
@pytest.mark.filterwarnings("ignore:Adapter 'default'. 2 LoRA tensor.s. have invalid shape")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
async def test_every_kind_of_adapter_gives_the_logprobs_of_peft(start: Start, root: Path) -> None:
    """Side by side, before and after the base changes beneath them. The base is the same as without them."""
    from peft import PeftModel

    bases = [make_qwen_moe(root / f"moe-{seed}", seed, "float32", attention_bias=True) for seed in (1, 2)]
    engine, prompt = await start(bases[0], page_size=8), prompt_of(3, 24)
    paths = {
        kind: adapter_by_peft(bases[0], root / kind, seed, **settings)
        for seed, (kind, settings) in enumerate(KINDS.items())
    }
    single = adapter_of_single_experts(bases[0], root / "single", root / "merged")
    for kind, path in (paths | {"single experts": single}).items():
        await load(engine, kind, path)

    async def check(model: Any, adapter: str | None) -> list[int]:
        result = await run(engine, ask(prompt, adapter=adapter, logprobs=True, prompt_logprobs=True))
        assert_greedy(model, prompt, result.tokens)
        expected = plain_logprobs(model, prompt, result.tokens)
        assert result.logprobs == pytest.approx(expected, abs=1e-4), adapter
        scored = given_prompt_logprobs(result)
        assert scored == pytest.approx(plain_prompt_logprobs(model, prompt), abs=1e-4), adapter
        return result.tokens

    made = [await check(load_plain(root / "merged"), "single experts")]
    for number, base in enumerate(bases):
        if number:
            await engine.pause("keep", False)
            await engine.swap(await stage(engine, base), version(number))
            await engine.resume()
        made.append(await check(load_plain(base), None))
        for kind, path in paths.items():
            model = PeftModel.from_pretrained(load_plain(base), path).eval()
            made.append(await check(model, kind))
    assert len({tuple(tokens) for tokens in made[: 2 + len(KINDS)]}) == 2 + len(KINDS)  # every adapter matters


async def test_the_base_is_exact_before_beside_and_after_adapters(
    start: Start, tiny: Path, made_by_peft: dict[str, Path]
) -> None:
    engine = await start(tiny, page_size=8)
    request = {"logprobs": True, "temperature": 1.0, "seed": 3, "max_tokens": 60}
    prompt = prompt_of(1, 30)

    async def base() -> tuple[list[int], list[float]]:
        await engine.flush_cache()
        result = await run(engine, ask(prompt, **request))
        return result.tokens, result.logprobs

    before = await base()
    for name, path in made_by_peft.items():
        await load(engine, name, path)
    assert await base() == before
    others = [Run(engine, ask(prompt, adapter=name, max_tokens=400)) for name in made_by_peft]
    for other in others:
        await other.reach(2)
    beside = await base()
    assert not any(other.result.finish for other in others)
    assert beside == before
    for name in made_by_peft:
        await unload_adapter(engine, name)
    assert await base() == before
    assert [(await other.end()).finish for other in others] == ["abort", "abort"]


async def test_prompt_logprobs_come_from_the_adapter(
    start: Start, tiny: Path, made_by_peft: dict[str, Path], plain: dict[str | None, Any]
) -> None:
    engine = await start(tiny, page_size=8, max_batch_tokens=32)
    for name, path in made_by_peft.items():
        await load(engine, name, path)
    prompt = prompt_of(1, 50)
    requests = [ask(prompt, adapter=adapter, prompt_logprobs=True) for adapter in plain]
    results = await asyncio.gather(*(run(engine, one) for one in requests))
    for model, result in zip(plain.values(), results, strict=True):
        assert given_prompt_logprobs(result) == pytest.approx(plain_prompt_logprobs(model, prompt), abs=1e-4)
    for adapter, model in plain.items():
        result = await run(engine, ask(prompt, adapter=adapter, logprobs=True))
        assert result.logprobs == pytest.approx(plain_logprobs(model, prompt, result.tokens), abs=1e-4)


async def test_a_prompt_is_scored_by_the_adapter_of_the_first_token(
    start: Start, tiny: Path, made_by_peft: dict[str, Path], plain: dict[str | None, Any]
) -> None:
    engine = await start(tiny, page_size=8, max_batch_tokens=24)
    await load(engine, "x", made_by_peft["one"], 1)
    prompt = prompt_of(1, 100)
    frozen = freeze_after(engine, 2)
    running = Run(engine, ask(prompt, adapter="x", prompt_logprobs=True))
    async with asyncio.timeout(BOUND_S):
        await frozen.wait()
    await load(engine, "x", made_by_peft["two"], 2)
    result = await running.end()
    (span,) = result.spans
    assert span.adapter is not None
    assert span.adapter.sequence == 2
    assert given_prompt_logprobs(result) == pytest.approx(plain_prompt_logprobs(plain["two"], prompt), abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_witness_adapters_are_exact_in_any_company(
    start: Start, witnesses: dict[int, Path], adapters: dict[int, Path], dtype: str
) -> None:
    engine = await start(witnesses[1], dtype, num_blocks=24, page_size=8, max_batch_tokens=16)
    for seed, path in adapters.items():
        await load(engine, f"a.{seed}", path, cast=dtype == "bfloat16")
    # Together they need several times the cache: each has to wait for room that requests of the others hold.
    asked = [(seed, token) for token in range(30, 40) for seed in (0, 1, 2, 3)]
    results = await asyncio.gather(
        *(
            run(engine, ask([5, token] * 8, adapter=f"a.{seed}" if seed else None, max_tokens=24))
            for seed, token in asked
        )
    )
    for (seed, token), result in zip(asked, results, strict=True):
        chain = adapter_chain(seed, token, 24) if seed else witnessed(1, token, 24)
        assert (result.tokens, result.finish) == (chain, "length")


async def test_an_adapter_waits_for_room_that_others_hold(
    start: Start, witnesses: dict[int, Path], adapters: dict[int, Path]
) -> None:
    engine = await start(witnesses[1], num_blocks=16, page_size=8)
    await load(engine, "x", adapters[1])
    held = [Run(engine, ask([n + 20] * 40, max_tokens=80 if n else 24)) for n in range(2)]
    for one in held:
        await one.reach(1)
    waiting = Run(engine, ask([30] * 40, adapter="x", max_tokens=24))
    await held[0].reach(4)
    assert (await waiting.end()).tokens == adapter_chain(1, 30, 24)
    for n, one in enumerate(held):
        assert (await one.end()).tokens == witnessed(1, n + 20, 80 if n else 24)


# changes


async def test_an_adapter_and_the_base_change_under_a_stream(
    start: Start, witnesses: dict[int, Path], adapters: dict[int, Path]
) -> None:
    engine = await start(witnesses[1])
    await load(engine, "x", adapters[1])
    one, bare = (Run(engine, ask([20], adapter=name, max_tokens=300)) for name in ("x", None))
    await one.reach(50)
    await load(engine, "x", adapters[2], sequence=2)
    await one.reach(100)
    new_base = await stage(engine, witnesses[2])
    await engine.pause("keep", False)
    await engine.swap(new_base, version(1))
    await engine.resume()
    await one.reach(150)
    engine.set_adapter_version("x", adapter_version(3, adapters[2]))
    result, base = await one.end(), await bare.end()
    assert [span.sequence for span in result.spans] == [0, 0, 1, 1]
    told = [(span.adapter.name, span.adapter.sequence) for span in result.spans if span.adapter]
    assert told == [("x", 1), ("x", 2), ("x", 2), ("x", 3)]
    assert result.spans[0].adapter is not None
    assert result.spans[0].adapter.digest == adapter_digest(adapters[1])
    assert result.spans[0].adapter.version == "lora_1"
    before = 20
    for span in result.spans:
        made = result.tokens[span.start : span.end]
        assert made == adapter_chain(1 if span.adapter and span.adapter.sequence == 1 else 2, before, len(made))
        before = made[-1]
    assert [(span.sequence, span.adapter) for span in base.spans] == [(0, None), (1, None)]
    before = 20
    for span in base.spans:
        assert span.sequence is not None
        made = base.tokens[span.start : span.end]
        assert made == witnessed(1 + span.sequence, before, len(made))
        before = made[-1]
    # All spans at the start, with each new one, and at the end; nothing in between.
    with_spans = [len(delta.spans) for delta in result.deltas if delta.spans]
    assert with_spans[0] == 1
    assert with_spans == sorted(with_spans)
    assert set(with_spans) == {1, 2, 3, 4}
    assert len(with_spans) <= 5 < len(result.deltas)
    assert result.deltas[0].spans
    with pytest.raises(InvalidRequest):
        engine.set_adapter_version("y", version(1))


async def test_an_adapter_that_fails_leaves_the_old_one(
    start: Start,
    tiny: Path,
    made_by_peft: dict[str, Path],
    plain: dict[str | None, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import peft

    engine = await start(tiny)
    prompt = prompt_of(2, 20)
    await load(engine, "x", made_by_peft["one"])
    begun = await run(engine, ask(prompt, adapter="x", logprobs=True))
    base = await run(engine, ask(prompt, logprobs=True))
    set_state, calls = peft.set_peft_model_state_dict, []

    def half(model: Any, tensors: dict[str, Any], name: str, **options: Any) -> Any:
        calls.append(set_state(model, dict(list(tensors.items())[::2]), name, **options))
        return calls[0]

    with monkeypatch.context() as patched:
        patched.setattr(peft, "set_peft_model_state_dict", half)
        with pytest.raises(EngineFailed, match="as a whole"):
            await staged_adapter(engine, made_by_peft["two"])
    assert len(calls) == 1
    after = await run(engine, ask(prompt, adapter="x", logprobs=True))
    assert after.tokens == begun.tokens
    assert after.logprobs == pytest.approx(begun.logprobs, abs=1e-6)  # shared blocks: other shapes, other rounding
    assert [span.adapter.sequence for span in after.spans if span.adapter] == [1]
    again = await run(engine, ask(prompt, logprobs=True))
    assert again.tokens == base.tokens
    assert not [name for name, _ in engine.model.named_parameters() if "lora" in name]
    await engine.pause("keep", False)
    again_staged = await staged_adapter(engine, made_by_peft["two"])
    await engine.swap_adapter("x", again_staged, adapter_version(2, made_by_peft["two"]))
    await engine.resume()
    second = await run(engine, ask(prompt, adapter="x", logprobs=True))
    assert second.logprobs == pytest.approx(plain_logprobs(plain["two"], prompt, second.tokens), abs=1e-4)
    discarded = await staged_adapter(engine, made_by_peft["two"])
    await asyncio.to_thread(engine.receiver.discard, discarded)
    for gone in (again_staged, discarded):
        with pytest.raises(EngineFailed, match="swapped or discarded"):
            await engine.swap_adapter("x", gone, adapter_version(3, made_by_peft["two"]))


async def test_unloading_ends_its_requests_and_no_others(
    start: Start, witnesses: dict[int, Path], adapters: dict[int, Path]
) -> None:
    engine = await start(witnesses[1])
    await load(engine, "x", adapters[1])
    await load(engine, "y", adapters[2])
    streams = [Run(engine, ask([20], adapter=name, max_tokens=300)) for name in ("x", "y", None)]
    for one in streams:
        await one.reach(5)
    await engine.pause("keep", False)
    waiting = Run(engine, ask([20], adapter="x"))
    while engine.load() != (3, 1):  # noqa: ASYNC110
        await asyncio.sleep(0)
    await engine.liveness()  # it has reached the engine
    await engine.swap_adapter("x", None, None)
    gone, held = await streams[0].end(), await waiting.end()
    assert (gone.finish, held.finish, held.tokens) == ("abort", "abort", [])
    assert gone.tokens == adapter_chain(1, 20, len(gone.tokens))
    assert gone.spans[-1].end == len(gone.tokens) >= 5
    await engine.swap_adapter("x", None, None)  # it is gone: the same again
    await engine.resume()
    assert (await streams[1].end()).tokens == adapter_chain(2, 20, 300)
    assert (await streams[2].end()).tokens == witnessed(1, 20, 300)
    for name in ("x", "never"):
        with pytest.raises(InvalidRequest) as caught:
            await run(engine, ask([20], adapter=name))
        assert caught.value.facts["field"] == "model"
    assert engine.load() == (0, 0)


# what is refused


def test_an_adapter_expects_the_tensors_that_peft_saves(tiny: Path, made_by_peft: dict[str, Path]) -> None:
    from safetensors.torch import load_file

    from worker.engines.hf.peft_layers import ModelAdapters

    adapters = ModelAdapters(load_plain(tiny), {})
    for path in made_by_peft.values():
        saved = load_file(path / "adapter_model.safetensors")
        config = json.loads((path / "adapter_config.json").read_text())
        assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
            name: spec.shape for name, spec in adapters.spec(config).items()
        }


def test_an_adapter_is_made_without_a_look_at_a_config_that_steps_change(
    tiny: Path, made_by_peft: dict[str, Path]
) -> None:
    """PEFT copies the config of the model that it gets. Python refuses to copy a dictionary that grows meanwhile."""
    from worker.engines.hf.peft_layers import ModelAdapters

    class Grows:
        def __deepcopy__(self, memo: object) -> object:
            raise RuntimeError("dictionary changed size during iteration")

    model = load_plain(tiny)
    adapters = ModelAdapters(model, {})
    model.config.changed_by_a_step = Grows()
    assert adapters.spec(json.loads((made_by_peft["one"] / "adapter_config.json").read_text()))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"target_modules": ["q_proj", "norm"]}, "target_modules"),
        ({"target_modules": ["query"]}, "target_modules"),
        ({"target_modules": ["proj"]}, "target_modules"),
        ({"modules_to_save": ["lm_head"], "layers_to_transform": [7]}, "layers_to_transform"),
        ({"trainable_token_indices": [512]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_modules": 5}, "target_modules"),
        ({"target_modules": [5]}, "target_modules"),
        ({"exclude_modules": True}, "exclude_modules"),
        ({"target_parameters": 5}, "target_parameters"),
        ({"modules_to_save": 2.5}, "modules_to_save"),
        ({"layers_pattern": True}, "layers_pattern"),
        ({"rank_pattern": 5}, "rank_pattern"),
        ({"alpha_pattern": []}, "alpha_pattern"),
    ],
)
async def test_configs_that_do_not_fit_this_model(
    start: Start, tiny: Path, made_by_peft: dict[str, Path], change: dict[str, Any], key: str
) -> None:
    engine = await start(tiny)
    config = json.loads((made_by_peft["one"] / "adapter_config.json").read_text())
    assert engine.holder.adapter_spec(config)
    with pytest.raises(InvalidWeights) as caught:
        engine.holder.adapter_spec(config | change)
    assert caught.value.facts["field"] == f"adapter_config.{key}"
    assert caught.value.facts["fix"]


def test_patterns_are_tried_with_the_names_of_parameters(root: Path) -> None:
    """PEFT matches ranks with the names of `target_parameters`, and this pattern ends for every other name."""
    from worker.engines.hf.peft_layers import ModelAdapters

    adapters = ModelAdapters(load_plain(make_qwen_moe(root / "moe-patterns", 1, "float32")), {})
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_parameters": ["mlp.experts.down_proj"],
        "rank_pattern": {r"(?=.*experts\.down_proj$)(\w+\.?)+!": 2},
    }
    with pytest.raises(InvalidWeights, match="takes more than 10 s") as caught:
        adapters.spec(config)
    assert caught.value.facts["field"] == "adapter_config.rank_pattern"


async def test_an_adapter_of_another_shape_is_refused_and_a_dtype_needs_cast(
    start: Start, root: Path, tiny: Path
) -> None:
    engine = await start(tiny)
    wide = make_tiny_model(root / "wide", seed=1, intermediate_size=384)
    half = make_tiny_model(root / "half", seed=1, dtype="bfloat16")
    with pytest.raises(InvalidWeights, match="another shape"):
        await staged_adapter(engine, make_tiny_adapter(wide, root / "wide-adapter", seed=1))
    path = make_tiny_adapter(half, root / "half-adapter", seed=1)
    with pytest.raises(InvalidWeights) as caught:
        await staged_adapter(engine, path)
    assert caught.value.facts["field"] == "cast"
    await load(engine, "x", path, cast=True)
    assert (await run(engine, ask([5], adapter="x"))).finish == "length"


async def test_without_peft_there_are_no_adapters(
    start: Start, tiny: Path, made_by_peft: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((made_by_peft["one"] / "adapter_config.json").read_text())
    engine = await start(tiny)
    assert not [op for op in engine.info.lacks if "update" in op]
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it weren't installed
    bare = await start(tiny)
    assert "rl-plane[hf]" in bare.info.lacks["prepare_update:lora"]
    with pytest.raises(Unsupported):
        bare.holder.adapter_spec(config)


# base weights beside adapters


async def test_base_weights_are_what_they_were(
    start: Start, witnesses: dict[int, Path], adapters: dict[int, Path]
) -> None:
    engine = await start(witnesses[1])
    spec = dict(engine.receiver.weight_spec())
    checksum = await engine.check_weights("checksum")
    await engine.check_weights("snapshot")
    await load(engine, "x", adapters[1])
    assert engine.receiver.weight_spec() == spec
    assert await engine.check_weights("checksum") == checksum
    assert (await engine.check_weights("compare"))[0]["match"]
    await engine.pause("keep", False)
    await engine.swap(await stage(engine, witnesses[2]), version(1))
    mismatches = (await engine.check_weights("compare"))[0]["mismatches"]
    assert "lm_head.weight" in mismatches
    assert {name for name in mismatches if name not in spec} == set()
    await engine.swap(await stage(engine, witnesses[1]), version(2))
    assert await engine.check_weights("checksum") == checksum
    await engine.resume()
    assert (await run(engine, ask([9], adapter="x"))).tokens == adapter_chain(1, 9, 16)


async def test_overwriting_in_place_needs_a_pause_and_changes_no_adapter(
    start: Start, witnesses: dict[int, Path], adapters: dict[int, Path]
) -> None:
    engine, other = await start(witnesses[1]), await start(witnesses[2])
    await load(engine, "x", adapters[1])
    runs = [Run(engine, ask([20], adapter=name, max_tokens=200)) for name in (None, "x")]
    for one in runs:
        await one.reach(20)

    def write() -> str:
        what = reception(witnesses[2], in_place=True)
        engine.receiver.open(*what)
        return engine.receiver.receive(what.staging, lambda: False)["digest"]

    with pytest.raises(EngineFailed, match="paused"):
        await asyncio.to_thread(write)
    await engine.pause("keep", False)
    await asyncio.to_thread(write)
    engine.set_version(version(1))
    await engine.resume()
    assert await engine.check_weights("checksum") == await other.check_weights("checksum")
    bare, adapted = [await one.end() for one in runs]
    assert adapted.tokens == adapter_chain(1, 20, 200)
    for result in (bare, adapted):
        assert [span.sequence for span in result.spans] == [0, 1]
        assert result.spans[0].end == result.spans[1].start >= 20
    end = bare.spans[0].end
    assert bare.tokens == [*witnessed(1, 20, end), *witnessed(2, bare.tokens[end - 1], 200 - end)]


async def test_after_an_overwrite_no_new_request_reuses_old_kv(start: Start, root: Path, tiny: Path) -> None:
    other = make_tiny_model(root / "tiny-3", seed=3)
    engine, prompt = await start(tiny, page_size=8), prompt_of(5, 50)
    await run(engine, ask(prompt))
    await engine.pause("keep", False)
    await write_over(engine, checkpoint(other))
    await engine.resume()
    result = await run(engine, ask(prompt, logprobs=True))
    expected = plain_logprobs(load_plain(other), prompt, result.tokens)
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


async def test_overwriting_holds_one_tensor_at_a_time(start: Start, witnesses: dict[int, Path]) -> None:
    engine = await start(witnesses[1])
    await engine.pause("keep", False)
    held = engine.holder.targets
    written: list[str] = []

    def stream() -> Iterator[tuple[str, HostTensor]]:
        before: tuple[str, HostTensor] | None = None
        for name, tensor in checkpoint(witnesses[2]):
            if before is not None:  # it is in the model before the next is asked for
                now = held[before[0]].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert now == bytes(before[1].data)
                written.append(before[0])
            before = (name, tensor)
            yield name, tensor

    await write_over(engine, stream())
    assert len(written) == len(engine.receiver.weight_spec()) - 1


async def test_an_overwrite_that_fails_leaves_weights_of_no_version(
    start: Start, witnesses: dict[int, Path], adapters: dict[int, Path]
) -> None:
    engine = await start(witnesses[1])
    await load(engine, "x", adapters[1])
    one = Run(engine, ask([20], max_tokens=60))
    await one.reach(10)
    await engine.pause("keep", False)
    await engine.check_weights("snapshot")

    def broken() -> Iterator[tuple[str, HostTensor]]:
        stream = checkpoint(witnesses[2])
        for _ in range(6):
            yield next(stream)
        raise InvalidWeights("cut short")

    with pytest.raises(InvalidWeights, match="cut short"):
        await write_over(engine, broken())
    with pytest.raises(InvalidWeights, match="missing"):
        await write_over(engine, iter(list(checkpoint(witnesses[2]))[:3]))
    assert 0 < len((await engine.check_weights("compare"))[0]["mismatches"]) < len(engine.receiver.weight_spec())
    await engine.resume()
    result = await one.end()
    assert len(result.tokens) == 60
    assert [(span.sequence, span.start) for span in result.spans] == [(0, 0)]
    assert 10 <= result.spans[0].end < 60
    lora = await run(engine, ask([20], adapter="x"))
    assert lora.spans == []  # an adapter's tokens are the base's too
    await engine.pause("keep", False)
    await write_over(engine, checkpoint(witnesses[1]))
    engine.set_version(version(2))
    await engine.resume()
    healed = await run(engine, ask([20]))
    assert healed.tokens == witnessed(1, 20, 16)
    assert [span.sequence for span in healed.spans] == [2]
