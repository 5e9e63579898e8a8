"""Workers and trainers by fork: the packages that they import take longer than most tests.

A zygote is started once for each test process and engine. It imports what that engine imports, makes no thread and no
loop, and then forks: once, and that child again, and ends. The grandchild is then an orphan, which the kernel gives to
the test process. The test process signals it and waits for it like a child that it has started itself. A zygote itself
is such a grandchild of its base, a zygote that has imported less: torch and transformers are imported once for all.

An engine's own processes come the same way: a worker of vLLM or SGLang has a zygote of its own from the start, a fork
of the first, which does what multiprocessing's `spawn` does with a new interpreter. So have they, in turn.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any, NoReturn

from rl_plane._util.plugins import ENGINES, TRANSPORTS, plugins
from rl_plane.cli.children import start_process
from rl_plane.protocol.transport_traits import known_transports
from tests.support.paths import ROOT
from worker.receive.host_agent import host_agent_process

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ADOPTED_S = 10.0
"""From the end of its first parent on it is ours at once."""

MAX_REQUEST_BYTES = 1 << 18
"""The environment is the largest part."""
MAX_DESCRIPTORS = 64
ABOVE = 1000
"""Descriptors on their way to their numbers are above all of those."""
_ZYGOTE = (
    "import sys; from tests.support.zygote import start; start(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
)
_OWN_NUMBER = 3
"""The descriptor of a zygote's socket, if its base has forked it."""
_SPAWN_MAIN = re.compile(r"spawn_main\(([^)]*)\)")
_NUMBER = re.compile(r"(\w+)=(\d+)")

Spawn = Callable[[bytes, Sequence[Any], Sequence[int]], int]


@dataclass(frozen=True)
class Packages:
    """The modules that a zygote imports beside those of its base, and the environment that an engine's adapter sets for
    its processes."""

    modules: tuple[str, ...]
    base: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    has_children: bool = False


RAW_IN_SGLANG = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""A variable of the environment, and what SGLang's sampler has read there."""

PACKAGES = {
    # A worker of the fake engine imports torch for its first group, and would so for each of many tests.
    "fake": Packages(
        (
            "worker.process",
            "rl_plane.cli.serve",
            "frontend.main",
            "torch.distributed",
            "worker.engines.fake.adapter",
        ),
        environment={"HF_HUB_OFFLINE": "1"},  # huggingface_hub reads it when it is imported
    ),
    "hf": Packages(
        (
            "worker.receive.weight_receiver",
            "rl_plane.transports.group.torch_group",
            "transformers.models.qwen3.modeling_qwen3",
            "worker.engines.hf.adapter",
        ),
        base="fake",
    ),
    "vllm": Packages(
        (
            "worker.engines.vllm.adapter",
            "vllm.v1.engine.async_llm",
            "vllm.v1.worker.cpu_worker",
            "vllm.model_executor.layers.quantization.online.base",
        ),
        base="hf",
        environment={"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"},
        has_children=True,
    ),
    "sglang": Packages(
        (
            "worker.engines.sglang.adapter",
            "sglang.srt.entrypoints.engine",
            "sglang.srt.managers.scheduler",
            "sglang.srt.models.registry",
        ),
        base="hf",
        environment={"TORCHDYNAMO_DISABLE": "1"},
        has_children=True,
    ),
    "trainer": Packages(("torch.distributed.fsdp", "tests.support.publishing_ranks"), base="fake"),
}


class Forked(subprocess.Popen[Any]):
    """A Popen of a child that a zygote has forked."""

    def __init__(self, pid: int, stdin: Any, stdout: Any, stderr: Any) -> None:
        self.args = ["worker"]
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._communication_started = False
        self._input = None
        self.text_mode = True
        self.encoding = self.errors = None
        self.pipesize = -1
        self.process_group = None


def fork_module(
    engine: str,
    module: str,
    arguments: Sequence[str] = (),
    log: Path | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    stdin: bool = False,
    stderr_pipe: bool = False,
    text: bool = False,
) -> Forked:
    """`python -m MODULE ARGUMENTS`, with all that this engine's worker imports there already. Its standard output is a
    pipe; so are its input and its standard error where that is asked for. `log`: where that goes otherwise."""
    with contextlib.ExitStack() as theirs:

        def pipe(number: int) -> Any:
            ends = os.pipe()
            own, its = ends if number else ends[::-1]
            theirs.callback(os.close, its)
            descriptors[number] = its
            mode = "r" if number else "w"
            return os.fdopen(own, mode if text else f"{mode}b")

        what = {"module": module, "argv": [module, *arguments], "env": dict(env)}
        descriptors: dict[int, int] = {}
        pipes = {number: pipe(number) for number in ([0] if stdin else []) + [1] + ([2] if stderr_pipe else [])}
        if log is not None:
            descriptors[2] = theirs.enter_context(log.open("a")).fileno()
        pid = _zygote(engine).fork(what, descriptors)
    return Forked(pid, *(pipes.get(number) for number in range(3)))


def fork_rl_plane(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Replaces the supervisor's start_process: forks `python … -m MODULE worker … --engine ENGINE` and frontends, and
    starts other commands."""
    module = argv.index("-m") + 1
    if (command := argv[module + 1]) not in ("worker", "frontend"):
        return start_process(argv, env)
    engine = argv[argv.index("--engine") + 1] if command == "worker" else "fake"
    return fork_module(engine, argv[module], argv[module + 1 :], env=env, stderr_pipe=True)


@contextlib.contextmanager
def children_forked(engine: str) -> Iterator[None]:
    """Runs the engine of the name in this process, and forks the processes that it starts."""
    execute = util.spawnv_passfds
    util.spawnv_passfds = functools.partial(_spawn, _zygote(engine), execute)
    try:
        yield
    finally:
        util.spawnv_passfds = execute


def start_zygote(engine: str) -> None:
    """Returns when processes of this engine can be forked at once. Call it before a loop that must not stand still."""
    _zygote(engine)


@functools.cache
def _zygote(engine: str) -> _Zygote:
    packages = PACKAGES[engine]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **packages.environment}
    ours, theirs = _socketpair()
    process: subprocess.Popen[Any]
    with theirs:
        if packages.base is not None:
            what = {"zygote": engine, "argv": ["-c"], "env": environment}
            process = Forked(_zygote(packages.base).fork(what, {_OWN_NUMBER: theirs.fileno()}), None, None, None)
        else:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
            process = subprocess.Popen(
                [sys.executable, "-c", _ZYGOTE, engine, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment,
            )

    def end() -> None:
        ours.close()
        process.wait(ADOPTED_S)

    atexit.register(end)
    if not ours.recv(64):
        raise RuntimeError(f"the zygote of {engine} has ended")
    return _Zygote(ours)


def _socketpair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class _Zygote:
    """The parent's handle of a zygote, by which processes are forked."""

    def __init__(self, ours: socket.socket) -> None:
        self._lock = threading.Lock()
        self._socket = ours

    def fork(self, what: dict[str, Any], descriptors: Mapping[int, int]) -> int:
        """`descriptors`: number there → number here."""
        data = json.dumps({"cwd": os.getcwd(), "numbers": list(descriptors), **what}).encode()
        with self._lock:
            socket.send_fds(self._socket, [data], list(descriptors.values()))
            answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the zygote has ended")
        return int(answer)


# ---- the zygote ----


def start(engine: str, descriptor: int, parent: int) -> NoReturn:
    """Until the test process ends."""
    packages = PACKAGES[engine]
    for module in packages.modules:
        importlib.import_module(module)
    for transport in plugins(TRANSPORTS).values():
        with contextlib.suppress(ModuleNotFoundError):
            transport.load()
    plugins(ENGINES)
    if (hooks := sys.modules.get("sglang.srt.plugins.hook_registry")) is not None:
        _look_for_functions_alone(hooks)
    assert len(os.listdir("/proc/self/task")) == 1, "threads don't survive a fork"
    gc.freeze()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(ModuleNotFoundError):
        # It looks for its place once, and finds it while the environment is where it was.
        importlib.import_module("setproctitle").getproctitle()
    # Not with its parent: that is a thread, which may end long before its process, by whose end this one's socket ends.
    asked = socket.socket(fileno=descriptor)
    asked.send(b"ready")
    _serve(asked, parent, packages.has_children)


def _look_for_functions_alone(hooks: Any) -> None:
    """SGLang looks for each function that is hooked in all variables of all modules, which takes half a second in each
    process of an engine. Nearly all that we hook are methods, which no variable of a module holds."""
    everywhere = hooks._propagate_patch
    hooks._propagate_patch = lambda old, new, owner: 0 if isinstance(owner, type) else everywhere(old, new, owner)


def _serve(asked: socket.socket, parent: int, has_children: bool) -> NoReturn:
    with asked:
        while True:
            what, descriptors = _received(asked)
            reader, writer = os.pipe()
            if (middle := os.fork()) == 0:
                if (pid := os.fork()) != 0:
                    os.write(writer, str(pid).encode())
                    os._exit(0)
                os.close(reader)
                os.close(writer)
                asked.close()
                _become(what, descriptors, parent, has_children)
            os.close(writer)
            for one in descriptors:
                os.close(one)
            with open(reader) as made:
                pid = int(made.read())
            os.waitpid(middle, 0)  # now it is its parent's
            asked.send(str(pid).encode())


def _received(asked: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, descriptors, _, _ = socket.recv_fds(asked, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
    if not data:
        os._exit(0)
    return json.loads(data), descriptors


def _become(what: dict[str, Any], descriptors: list[int], parent: int, has_children: bool) -> NoReturn:
    above = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, ABOVE) for one in descriptors]
    for one in descriptors:
        os.close(one)
    for one, number in zip(above, what["numbers"], strict=True):
        os.dup2(one, number)
        os.close(one)
    _wait_for_adoption(parent)
    os.chdir(what["cwd"])
    os.environ.clear()
    os.environ.update(what["env"])
    # What an interpreter has made of another environment.
    tempfile.tempdir = None
    if (sampler := sys.modules.get("sglang.srt.layers.sampler")) is not None:
        setattr(sampler, RAW_IN_SGLANG, what["env"].get(RAW_IN_SGLANG) == "1")
    more = list(filter(None, what["env"].get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[1:1] = more
    if more:
        plugins.cache_clear()  # there may be plugins, too
        known_transports.cache_clear()
    sys.argv = what["argv"]
    if has_children:
        _have_children_forked([one for one in what["numbers"] if one > 2])
    if "zygote" in what:
        _end_with(functools.partial(start, what["zygote"], _OWN_NUMBER, parent))
    _end_with(functools.partial(_run_spawned if "spawned" in what else _run_module, what))


def _run_module(what: dict[str, Any]) -> None:
    if what.get("leads", True):
        os.setsid()
        # Only now: before, it would be with who has made it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    runpy.run_module(what["module"], run_name="__main__", alter_sys=True)


def _run_spawned(what: dict[str, Any]) -> None:
    spawn.spawn_main(**what["spawned"])


def _end_with(main: Callable[[], None]) -> NoReturn:
    """Runs `main` and exits with its code, like an interpreter does."""
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait_for_adoption(parent: int) -> None:
    give_up = time.monotonic() + ADOPTED_S
    while os.getppid() != parent:
        if time.monotonic() > give_up:
            os._exit(1)
        time.sleep(0.0005)


def _have_children_forked(own: Sequence[int]) -> None:
    """A zygote of this process's own forks its children from now on. `own`: descriptors that end with this process."""
    worker = os.getpid()
    ours, theirs = _socketpair()
    if os.fork() == 0:
        ours.close()
        for one in own:
            os.close(one)
        _serve(theirs, worker, has_children=True)
    theirs.close()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    zygote = _Zygote(ours)
    util.spawnv_passfds = functools.partial(_spawn, zygote, util.spawnv_passfds)
    host_agent_process.start_agent = functools.partial(_fork_host_agent, zygote)


def _fork_host_agent(zygote: _Zygote, arguments: Sequence[str], descriptor: int) -> Forked:
    module = host_agent_process.MODULE
    what = {"module": module, "argv": [module, *arguments], "env": dict(os.environ), "leads": False}
    return Forked(zygote.fork(what, {descriptor: descriptor}), None, None, None)


def _spawn(zygote: _Zygote, execute: Spawn, path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Called by multiprocessing, in place of `execute`, which starts an interpreter."""
    command = " ".join(map(os.fsdecode, args))
    if (call := _SPAWN_MAIN.search(command)) is None:
        return execute(path, args, passfds)
    pipes = {name: int(number) for name, number in _NUMBER.findall(call[1])}
    what = {"spawned": pipes, "argv": ["-c", "--multiprocessing-fork"], "env": dict(os.environ)}
    return zygote.fork(what, {one: one for one in map(int, passfds)})
