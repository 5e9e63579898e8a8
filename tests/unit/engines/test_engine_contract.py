"""The conformance suite passes on engines that keep the contract, and fails on engines that break it."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rl_plane.errors import InvalidRequest
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.versions import WeightVersion
from tests.support.paths import ROOT
from worker.engines import capabilities
from worker.engines.base import EngineAdapter, EngineFactory, EngineOptions, PauseMode
from worker.engines.capabilities import OPS
from worker.engines.common.weights_in_ranks import WeightsInRanks
from worker.engines.fake.adapter import FakeEngine, make_fake_adapter, make_fake_model
from worker.engines.fake.adapter import build as build_fake
from worker.process import check_receiver, checked_engine
from worker.receive.weight_receiver import Receiver
from worker.testing.engine_contract import (
    CHECKS,
    Check,
    EngineUnderTest,
    a_dropped_staging_leaves_no_trace,
    aborts,
    check_close,
    check_engine,
    gives_a_text_its_form,
    kept_kv_is_told_and_used_by_no_other_request,
    labels_its_tokens,
    pause_keep_freezes,
    pause_wait_drains,
    swap_changes_tokens_and_nothing_else,
    tells_its_capabilities_honestly,
)

PAGE = (ROOT / "docs" / "engine-of-your-own.md").read_text()


def table_under(header: str) -> str:
    """The first cells of the page's table with this header."""
    rows = PAGE.split(header)[1].split("\n\n")[0].splitlines()[2:]
    return " ".join(row.split("|")[1] for row in rows)


def test_the_page_on_engines_names_each_capability() -> None:
    protocols = {
        name for name, one in vars(capabilities).items() if name.startswith("Can") and inspect.isclass(one)
    }
    assert protocols > {one.__name__ for one in OPS}
    assert set(re.findall(r"`(\w+)`", table_under("| protocol | ops |"))) == protocols


def test_the_page_on_engines_names_each_method_that_an_engine_implements() -> None:
    class InRanks(WeightsInRanks, EngineAdapter):
        pass

    methods = set(re.findall(r"`(\w+)`", table_under("| method | does |")))
    assert methods == EngineAdapter.__abstractmethods__
    assert "eleven" in PAGE
    assert len(methods) == 11
    members = set(re.findall(r"`(\w+)`", table_under("| member | is |")))
    assert members == InRanks.__abstractmethods__ - EngineAdapter.__abstractmethods__


def test_an_engine_that_is_no_adapter_is_refused_at_the_start() -> None:
    half = type("Half", (), {})
    with pytest.raises(InvalidRequest, match="Half is no EngineAdapter"):
        checked_engine(half())


def test_an_engine_without_a_receiver_of_weights_is_refused(tmp_path: Path) -> None:
    engine = build_fake(EngineOptions(make_fake_model(tmp_path / "model", 1), device="cpu"))
    check_receiver(engine)
    del engine.receiver
    with pytest.raises(InvalidRequest, match="FakeEngine has no receiver"):
        check_receiver(engine)


def build_echo(options: EngineOptions) -> EngineAdapter:
    """The engine of examples/echo_engine, without installing it."""
    name = "rl_plane_echo"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "echo_engine" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    engine: EngineAdapter = sys.modules[name].build(options)
    return engine


BUILDS: dict[str, EngineFactory] = {"fake": build_fake, "echo": build_echo}


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return EngineOptions(make_fake_model(tmp_path / "model", 1), device="cpu")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return make_fake_model(tmp_path / "other", 2)


@pytest.fixture(params=BUILDS)
async def under_test(
    request: pytest.FixtureRequest, options: EngineOptions, other: Path, tmp_path: Path
) -> AsyncIterator[EngineUnderTest]:
    adapter = make_fake_adapter(tmp_path / "adapter", 1, options.model)
    async with EngineUnderTest.started(BUILDS[request.param], options, other, adapter=adapter) as started:
        yield started


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
async def test_an_engine_keeps_the_contract(check: Check, under_test: EngineUnderTest) -> None:
    await check(under_test)


@pytest.mark.parametrize("name", BUILDS)
async def test_close_ends_an_engine(name: str, options: EngineOptions) -> None:
    await check_close(BUILDS[name], options)


async def test_one_call_runs_every_check(options: EngineOptions, other: Path) -> None:
    await check_engine(build_fake, options, other)


class KeepsOldWeights(FakeEngine):
    async def swap(self, staging: str, version: WeightVersion, *, keep_kv: bool = False) -> bool:
        self.receiver.take(staging)
        self.set_version(version)
        return True


class AlwaysKeepsKv(FakeEngine):
    async def swap(self, staging: str, version: WeightVersion, *, keep_kv: bool = False) -> bool:
        return await super().swap(staging, version, keep_kv=True)


class ForgetsLabels(FakeEngine):
    def set_version(self, version: WeightVersion) -> None:
        pass


class IgnoresForms(FakeEngine):
    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        return super().generate(request.model_copy(update={"structured_output": None}))


class NeverPauses(FakeEngine):
    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        return clear_cache


class AbortsNothing(FakeEngine):
    async def abort(self, request_ids: list[str] | None) -> int:
        return 0


class KeepsStagings(FakeEngine):
    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.receiver = KeepingReceiver(self.receiver.holder, self.receiver.transports)


class KeepingReceiver(Receiver):
    def discard(self, staging: str) -> None:
        pass


class TakesAnyToken(FakeEngine):
    async def detokenize(self, token_ids: list[int]) -> str:
        return ""


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (KeepsOldWeights, swap_changes_tokens_and_nothing_else),
        (AlwaysKeepsKv, kept_kv_is_told_and_used_by_no_other_request),
        (ForgetsLabels, labels_its_tokens),
        (IgnoresForms, gives_a_text_its_form),
        (NeverPauses, pause_keep_freezes),
        (NeverPauses, pause_wait_drains),
        (AbortsNothing, aborts),
        (KeepsStagings, a_dropped_staging_leaves_no_trace),
        (TakesAnyToken, tells_its_capabilities_honestly),
    ],
)
async def test_a_check_fails_on_an_engine_that_breaks_the_contract(
    kind: type[FakeEngine], check: Check, options: EngineOptions, other: Path
) -> None:
    paced = replace(
        options, extra={"token_delay_s": "0.002"}
    )  # a stream that ends early hides what an engine breaks
    async with EngineUnderTest.started(kind, paced, other) as under_test:
        with pytest.raises(AssertionError):
            await check(under_test)
