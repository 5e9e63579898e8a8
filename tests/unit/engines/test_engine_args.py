"""The YAML file of engine arguments: the arguments that reach an engine, and those refused before it is built."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rl_plane.errors import InvalidRequest
from tests.support.paths import ROOT
from worker.engines.base import Arguments, EngineOptions
from worker.engines.fake.adapter import make_fake_model
from worker.engines.fake.config import FakeConfig
from worker.runtime.engine_args import EngineArguments

ENGINES_PAGE = ROOT / "docs" / "engines.md"
THEIRS = pytest.mark.filterwarnings("ignore:::(torch|vllm|sglang|transformers|multiprocessing)")
"""The warnings at import of what is not ours."""

Parse = Callable[[Mapping[str, str]], Any]


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "engine.yaml"
        file.write_text(text)
        return file

    return write


def test_values_become_what_one_would_type(written: Callable[[str], Path]) -> None:
    file = written(
        """
        # as in vLLM's own --config FILE
        tensor-parallel-size: 2
        gpu_memory_utilization: 0.9
        enforce-eager: true
        enable_prefix_caching: no
        revision: "1.10"
        cudagraph_capture_sizes: [1, 2]
        compilation-config: {level: 3, use_inductor: false}
        """
    )
    assert EngineArguments({}, file).texts == {
        "tensor_parallel_size": "2",
        "gpu_memory_utilization": "0.9",
        "enforce_eager": "true",
        "enable_prefix_caching": "false",
        "revision": "1.10",
        "cudagraph_capture_sizes": "[1, 2]",
        "compilation_config": '{"level": 3, "use_inductor": false}',
    }


def test_the_command_line_wins_and_comes_last(written: Callable[[str], Path]) -> None:
    file = written("tp-size: 1\ncontext_length: 512\nmax_lora_rank: 8\n")
    texts = EngineArguments({"context-length": "64", "tp_size": "2"}, file).texts
    assert list(texts.items()) == [("max_lora_rank", "8"), ("context_length", "64"), ("tp_size", "2")]
    assert EngineArguments({"a-b": "c-d"}).texts == {"a_b": "c-d"}


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("", "", "not a map"),
        ("- tp_size: 2", "", "not a map"),
        ("tp_size=2", "", "not a map"),
        ("tp_size: [", "", "not YAML"),
        ("tp_size: 1\n---\ntp_size: 2", "", "not YAML"),
        ("when: 2026-13-41", "", "not YAML"),
        ("a: &a [*a]", "", "not YAML"),
        ("a: !!python/object/apply:os.getpid []", "", "not YAML"),
        ("2: 3", "", "2 is not the name"),
        ("tp_size: 1\ntp-size: 2", "tp_size", "twice"),
        ("tp_size: 1\ntp_size: 1", "tp_size", "twice"),
        ("tp_size:", "tp_size", "no value"),
        ("tp_size: null", "tp_size", "no value"),
        ("when: 2026-11-20", "when", "is date"),
        ("share: .nan", "share", "is float"),
        ("limits: {top: [.inf]}", "limits", "is dict"),
        ("bytes: !!binary aGk=", "bytes", "is bytes"),
    ],
)
def test_a_file_that_is_no_map_of_arguments_is_refused(
    written: Callable[[str], Path], text: str, key: str, words: str
) -> None:
    file = written(text)
    with pytest.raises(InvalidRequest) as caught:
        EngineArguments({}, file)
    assert caught.value.message.startswith(f"{file}: ")
    assert words in caught.value.message
    assert caught.value.facts["field"] == (f"engine_args_file.{key}" if key else "engine_args_file")
    assert caught.value.facts["fix"]


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be read: No such file"):
        EngineArguments({}, tmp_path / "gone.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="not YAML"):
        EngineArguments({}, tmp_path / "binary.yaml")


def refusal(parse: Parse, file: Path, **given: str) -> InvalidRequest:
    arguments = EngineArguments(given, file)
    with pytest.raises(InvalidRequest) as caught, arguments.named():
        parse(arguments.texts)
    return caught.value


def check_refusals(parse: Parse, written: Callable[[str], Path], bad: dict[str, str]) -> None:
    """Each line of `bad` names its key, and the file, unless it was given beside the file."""
    for line, words in bad.items():
        file = written(line)
        key, _, value = line.partition(": ")
        error = refusal(parse, file)
        assert error.facts["field"] == f"engine_args_file.{key.replace('-', '_')[:64]}"
        assert error.message.startswith(f"{file}: ")
        assert words in error.message + error.facts["fix"]
        error = refusal(parse, file, **{key: value})
        assert error.facts["field"] == f"engine_arg.{key.replace('-', '_')[:64]}"
        assert str(file) not in error.message


def parser(model: type[Arguments]) -> Callable[[Mapping[str, str]], Arguments]:
    return lambda texts: EngineOptions(Path(), extra=texts).arguments(model)


def test_the_fake_engine_refuses_a_wrong_argument_by_name(written: Callable[[str], Path]) -> None:
    file = written("vocab-size: 300\nhold_bytes: false\ntoken_delay_s: 0.5")
    config = parser(FakeConfig)(EngineArguments({"vocab_size": "400"}, file).texts)
    assert (config.vocab_size, config.hold_bytes, config.token_delay_s) == (400, False, 0.5)
    bad = {
        "speed: 3": "no argument 'speed'use one of token_delay_s",
        "vocab-size: many": "integer",
        "hold_bytes: 7": "boolean",
    }
    check_refusals(parser(FakeConfig), written, bad)


def test_the_hf_engine_refuses_a_wrong_argument_by_name(written: Callable[[str], Path]) -> None:
    from worker.engines.hf.adapter import HfArguments

    file = written("num-blocks: 64")
    assert parser(HfArguments)(EngineArguments({}, file).texts).num_blocks == 64
    check_refusals(
        parser(HfArguments),
        written,
        {"speed: 3": "no argument 'speed'use one of num_blocks", "num-blocks: 2.5": "integer"},
    )


@pytest.mark.engines("vllm")
@THEIRS
def test_vllms_arguments_are_parsed_and_wrong_ones_refused(written: Callable[[str], Path]) -> None:
    from worker.engines.vllm.args import parse_arguments

    file = written(
        """
        tensor-parallel-size: 2
        gpu_memory_utilization: 0.5
        enforce-eager: true
        enable_prefix_caching: false
        disable-log-stats: true
        cudagraph_capture_sizes: [1, 2]
        hf_overrides: {rope_theta: 1.0}
        """
    )
    arguments = EngineArguments({"gpu-memory-utilization": "0.75"}, file)
    with arguments.named():
        assert parse_arguments(arguments.texts) == {
            "tensor_parallel_size": 2,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "cudagraph_capture_sizes": [1, 2],
            "hf_overrides": {"rope_theta": 1.0},
            "gpu_memory_utilization": 0.75,
        }
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", ENGINES_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert parse_arguments(EngineArguments({}, written(shown)).texts)["max_lora_rank"] == 16
    bad = {
        "speed: 3": "no argument",
        "tensor-parallel-size: two": "invalid",
        "enforce_eager: 1": "true or false",
        "cudagraph_capture_sizes: [one]": "invalid",
        "model: /x": "--model",
        "kv-offloading-backend: lmcache": "kv_offloading_size",
        "spec-tokens: 2": "draft model",
    }
    check_refusals(parse_arguments, written, bad)


@pytest.mark.engines("sglang")
@THEIRS
def test_sglangs_arguments_are_parsed_and_wrong_ones_refused(written: Callable[[str], Path]) -> None:
    from worker.engines.sglang.args import WITH_LORA, check_cpu, parse_arguments

    file = written(
        """
        tensor-parallel-size: 2
        mem-fraction-static: 0.5
        disable_cuda_graph: true
        max_lora_rank: 8
        lora-target-modules: [q_proj, k_proj]
        """
    )
    arguments = EngineArguments({"mem_fraction_static": "0.75"}, file)
    with arguments.named():
        values = parse_arguments(arguments.texts)
    assert values == dict(WITH_LORA) | {
        "tp_size": 2,
        "disable_cuda_graph": True,
        "max_lora_rank": 8,
        "lora_target_modules": values["lora_target_modules"],
        "mem_fraction_static": 0.75,
    }
    assert set(values["lora_target_modules"]) == {"q_proj", "k_proj"}
    assert parse_arguments(EngineArguments({"tp_size": "4"}, file).texts)["tp_size"] == 4
    check_cpu(values)
    with pytest.raises(InvalidRequest, match="CPU kernels") as caught:
        check_cpu(parse_arguments({"expert_parallel_size": "2"}))
    assert caught.value.facts["field"] == "engine_arg.ep_size"
    bad = {
        "speed: 3": "no argument",
        "tensor-parallel-size: two": "is not int",
        "model: /x": "--model",
        "kv-cache-dtype: int3": "not known",
        "hicache-storage-backend: file": "outlive an update",
        "stream-interval: 4": "label of new ones",
    }
    check_refusals(parse_arguments, written, bad)


class _Told(Exception):
    """Carries the arguments that an engine would be built with."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords


def _refuse(**keywords: Any) -> NoReturn:
    raise _Told(**keywords)


def _told_to_vllm(monkeypatch: pytest.MonkeyPatch, model: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    import vllm

    from worker.engines.vllm.processes import VllmProcess

    monkeypatch.setattr(vllm, "AsyncEngineArgs", _refuse)
    with pytest.raises(_Told) as caught:
        VllmProcess(EngineOptions(model, "float32"), arguments)._build(model)
    return caught.value.keywords


def _told_to_sglang(monkeypatch: pytest.MonkeyPatch, model: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.entrypoints import engine

    from worker.engines.sglang.processes import SglangProcess

    class Engine:
        def __init__(self, **keywords: Any) -> None:
            _refuse(**keywords)

    monkeypatch.setattr(engine, "Engine", Engine)

    with pytest.raises(_Told) as caught:
        SglangProcess(EngineOptions(model), arguments, "cpu", 0)._build(model)
    return caught.value.keywords


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        pytest.param(name, told, marks=pytest.mark.engines(name), id=name)
        for name, told in (("vllm", _told_to_vllm), ("sglang", _told_to_sglang))
    ],
)
@THEIRS
def test_an_argument_that_the_worker_sets_itself_is_refused_or_gives_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str, told: Callable[..., dict[str, Any]]
) -> None:
    arguments = importlib.import_module(f"worker.engines.{engine}.args")
    given = told(monkeypatch, tmp_path, {})
    ours = {key: "theirs" for key in given if key not in arguments.OURS}
    assert given.keys() - ours.keys(), "some are refused"
    assert ours, "some give way"
    assert told(monkeypatch, tmp_path, ours) == given | ours


def test_a_worker_says_what_is_wrong_with_its_file(written: Callable[[str], Path], tmp_path: Path) -> None:
    model = make_fake_model(tmp_path / "model", seed=0)
    file = written("vocab-size: many")
    for given, words in (
        (file, f"{file}: vocab_size is 'many': Input should be a valid integer"),
        (tmp_path / "gone.yaml", "gone.yaml': name an existing file"),
    ):
        command = ["worker", "--engine", "fake", "--model", str(model), "--engine-args-file", str(given)]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "rl_plane.cli.main", *command],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_without_pyyaml_the_extra_is_named(written: Callable[[str], Path], tmp_path: Path) -> None:
    argv = ["worker", "--engine", "fake", "--model", str(make_fake_model(tmp_path / "model", seed=0))]
    argv += ["--engine-args-file", str(written("vocab_size: 300"))]
    code = f"import sys; sys.modules['yaml'] = None; from rl_plane.cli.main import run; sys.exit(run({argv!r}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "rl-plane: error: the Python module yaml is not installed; fix: pip install 'rl-plane[worker]'\n"
    )
