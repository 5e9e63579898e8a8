"""The product's imports.

Packages import downwards only, no modules import each other in a circle, and the product imports no test. Transports,
engines and dialects don't import each other. Pure modules import nothing that waits or sends.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from rl_plane.protocol.dialects import DIALECTS
from tests.support.paths import ROOT

LAYERS = {
    "rl_plane": (
        {"errors", "_util"},
        {"protocol"},
        {"bus", "weights"},
        {"membership", "transports"},
        {"commit"},
        {"fleet"},
        {"client"},
        {"sync"},
        {"rollouts", "publish"},
        {"cli", "demo"},
    ),
    "worker": (
        {"exit_codes", "receive", "runtime"},
        {"nodes"},
        {"engines", "worker_options"},
        {"reconcile"},
        {"ops", "generation_service"},
        {"worker"},
        {"metrics", "testing"},
        {"process"},
    ),
    "frontend": (
        {"frontend_limits"},
        {"server", "routing"},
        {"completions"},
        {"metrics", "records", "pooling"},
        {"facade"},
        {"dashboard", "dialects", "served_component"},
        {"main"},
    ),
}
"""Top-level package → its packages and modules, the lowest first. Each may import its own package and lower layers."""
ALSO_SIDEWAYS = ({"errors", "_util"}, {"cli", "demo"})
"""Layers whose parts may import each other."""
LEVEL = {(top, name): level for top in LAYERS for level, names in enumerate(LAYERS[top]) for name in names}

MAY_IMPORT = {"rl_plane": set[str](), "worker": {"rl_plane"}, "frontend": {"rl_plane"}}
"""Top-level package → the other top-level packages that it may import."""
STARTS_PROCESSES = ("rl_plane.cli", "rl_plane.demo")
"""Packages that may import worker and frontend, because they start them."""

NOT_PRODUCT = {"tests", "bench", "examples", "docs", "deploy"}
"""Top-level folders with Python files that the product must not import."""

PARTS = {
    "rl_plane.transports": {"filesystem", "group", "http", "ipc", "nixl", "object_store"},
    "worker.engines": {"fake", "hf", "sglang", "vllm"},
    "frontend.dialects": {"prime_rl", "sglang", "vllm"},
}
"""Package → its parts that must not know each other. The rest of the package is common to them, and imports none."""
COMMON = "common"
"""The folder of a package that its parts share."""
USERS_OF_A_PART = {
    ("frontend.dialects.sglang.body_tensors", "rl_plane.transports.object_store.sender"),
    ("rl_plane.cli.models", "worker.engines.fake.adapter"),
}
"""(module, imported): the only imports of a part from outside of it."""

COMMIT = "rl_plane.commit"
PURE_IN_WORKERS = {
    f"worker.reconcile.{name}" for name in ("worker_core", "instructions", "worker_state", "numerics")
}
IMPURE = ("asyncio", "nats", "socket", "rl_plane.bus")
"""Modules and packages that a pure module must not import."""

LOADS_BY_NAME = {"rl_plane", "rl_plane.cli.span_export", "frontend.dialects"}
"""Modules that may import modules of the product by a string: lazy public names, an extra, and the chosen dialects."""
LOADERS = {"import_module", "__import__"}


def module_name(path: Path, root: Path) -> str:
    """The dotted name of a file below `root`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields all imports, also those inside functions and under `if TYPE_CHECKING`."""
    return (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))


@cache
def sources(root: Path = ROOT) -> dict[str, str]:
    """Module of the product below `root` → its text."""
    files = [path for top in MAY_IMPORT for path in sorted((root / top).rglob("*.py"))]
    return {module_name(path, root): path.read_text() for path in files}


def imported_names(module: str, tree: ast.AST) -> set[str]:
    """The dotted names that a module imports. `from a.b import c` gives `a.b.c`, whether or not `c` is a module."""
    found: set[str] = set()
    for node in imports_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        assert node.level == 0, f"{module} imports relatively"
        found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def names_by_module(root: Path = ROOT) -> dict[str, set[str]]:
    """Module of the product below `root` → the dotted names that it imports."""
    return {module: imported_names(module, ast.parse(text)) for module, text in sources(root).items()}


@cache
def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Module → the modules of the product that it imports. A package that is imported only on the way to a module in it
    is left out: the import of `a.b` means `a.b`."""
    modules = names_by_module(root)
    graph: dict[str, set[str]] = {}
    for module, names in modules.items():
        found = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = (found & modules.keys()) - {module}
    return graph


def is_in(name: str, package: str) -> bool:
    """True for a package itself, and for what is in it."""
    return name == package or name.startswith(f"{package}.")


def imports_into(root: Path, modules: Collection[str], forbidden: Collection[str]) -> set[tuple[str, str]]:
    """(module, name) for each import by one of `modules` of something in a forbidden package."""
    names = names_by_module(root)
    return {
        (module, name)
        for module in modules
        for name in names[module]
        if any(is_in(name, package) for package in forbidden)
    }


def part_of(module: str, package: str) -> str | None:
    """The part of the package that a module is in. None: it is in no part."""
    if not module.startswith(f"{package}."):
        return None
    name = module.removeprefix(f"{package}.").partition(".")[0]
    return name if name in PARTS[package] else None


def joins_two_parts(module: str, imported: str) -> bool:
    """Reports whether `module` imports a part that it is not in, and is not a listed user of it."""
    if (module, imported) in USERS_OF_A_PART:
        return False
    return any(part_of(imported, package) not in (None, part_of(module, package)) for package in PARTS)


def unlisted_parts(root: Path, package: str) -> set[str]:
    """The folders of a package that are neither a part nor common to the parts."""
    folder = root.joinpath(*package.split("."))
    return {path.parent.name for path in folder.glob("*/__init__.py")} - PARTS[package] - {COMMON}


def pure_modules(root: Path) -> set[str]:
    """The modules that the README of the commit protocol calls pure, and those of a worker's reconciliation."""
    folder = root.joinpath(*COMMIT.split("."))
    sentence = re.search(r"All files but ([^:]*?) are pure", (folder / "README.md").read_text())
    assert sentence, "the README says which files are not pure"
    shells = set(re.findall(r"`(\w+)\.py`", sentence[1]))
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert shells <= names, f"the README names files that are not there: {shells - names}"
    return {f"{COMMIT}.{name}" for name in names - shells} | PURE_IN_WORKERS


def loads_by_name(tree: ast.AST) -> bool:
    """Reports whether a module can import a module of the product by a string.

    A call with the literal name of a foreign module can't. Everything else can: a call with a variable, a loader that
    is passed on, or a loader under another name.
    """
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    harmless = {id(node.func) for node in calls if names_a_foreign_module(node.args[0])}
    mentions = [
        node
        for node in nodes
        if (isinstance(node, ast.Attribute) and node.attr in LOADERS)
        or (isinstance(node, ast.Name) and node.id in LOADERS)
    ]
    renamed = [
        node for node in nodes if isinstance(node, ast.alias) and node.name in LOADERS and node.asname is not None
    ]
    return bool(renamed) or any(id(node) not in harmless for node in mentions)


def names_a_foreign_module(argument: ast.expr) -> bool:
    """True for a literal string with the absolute name of a module outside the product."""
    if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
        return False
    return argument.value.partition(".")[0] not in {"", *MAY_IMPORT}


def top_level_packages(root: Path) -> set[str]:
    """The folders of the repository from which Python could import."""
    return {
        folder.name
        for folder in root.iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
        if any(folder.glob("*.py")) or any(folder.glob("*/__init__.py"))
    }


def level_of(module: str) -> int | None:
    """The layer of a module. None: it is a top-level package itself."""
    top, *inner = module.split(".")
    return LEVEL[top, inner[0]] if inner else None


def breaks_a_direction(module: str, imported: str) -> bool:
    """Reports whether `module` may not import `imported`."""
    top, other = module.split(".")[0], imported.split(".")[0]
    if top != other:
        return other not in MAY_IMPORT[top] and not module.startswith(STARTS_PROCESSES)
    level, below = level_of(module), level_of(imported)
    if level is None:
        return False
    if below is None:
        return True  # `rl_plane` itself imports nearly everything
    same_part = module.split(".")[1] == imported.split(".")[1] or LAYERS[top][level] in ALSO_SIDEWAYS
    return below > level or (below == level and not same_part)


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in sorted(graph[module]):
            if imported not in index:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], index[imported])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.add(frozenset(component))

    for module in graph:
        if module not in index:
            visit(module)
    return found


def test_every_part_has_a_layer() -> None:
    parts = {(name.split(".")[0], name.split(".")[1]) for name in import_graph() if "." in name}
    assert parts == LEVEL.keys()


def test_packages_import_downwards_only() -> None:
    upward = {
        (module, imported)
        for module, found in import_graph().items()
        for imported in found
        if breaks_a_direction(module, imported)
    }
    assert upward == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycles(import_graph()) == set()


def test_every_top_level_package_is_listed() -> None:
    assert top_level_packages(ROOT) <= MAY_IMPORT.keys() | NOT_PRODUCT


def test_the_product_imports_no_test_no_benchmark_and_no_example() -> None:
    assert imports_into(ROOT, import_graph(), NOT_PRODUCT) == set()


def test_every_transport_engine_and_dialect_is_listed() -> None:
    assert not set[str]().union(*(unlisted_parts(ROOT, package) for package in PARTS))
    assert {part_of(module, "frontend.dialects") for module in DIALECTS.values()} == PARTS["frontend.dialects"]


def test_transports_engines_and_dialects_do_not_import_each_other() -> None:
    imports = {(module, imported) for module, found in import_graph().items() for imported in found}
    assert {one for one in imports if joins_two_parts(*one)} == set()
    assert imports >= USERS_OF_A_PART, "a listed import is gone: remove it from the list"


def test_pure_modules_do_not_wait_and_do_not_send() -> None:
    assert imports_into(ROOT, pure_modules(ROOT), IMPURE) == set()


def test_few_modules_import_modules_of_the_product_by_a_string() -> None:
    mentioning = {module: text for module, text in sources().items() if any(loader in text for loader in LOADERS)}
    assert {module for module, text in mentioning.items() if loads_by_name(ast.parse(text))} == LOADS_BY_NAME


def test_a_cycle_a_lazy_import_and_an_import_of_a_type_are_found() -> None:
    hidden = ast.parse("def late():\n    import a.b\n\nif TYPE_CHECKING:\n    import c\n")
    assert {ast.unparse(node) for node in imports_of(hidden)} == {"import a.b", "import c"}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}


def test_an_upward_and_a_sideways_import_are_found() -> None:
    assert breaks_a_direction("rl_plane.protocol.record", "rl_plane.bus.lock")
    assert breaks_a_direction("rl_plane.bus.lock", "rl_plane.weights.manifest")
    assert breaks_a_direction("worker.worker", "frontend.main")
    assert breaks_a_direction("worker.nodes.node_process", "worker.engines.capabilities")
    assert breaks_a_direction("worker.worker", "worker.testing.tiny_model")
    assert breaks_a_direction("worker.generation_service", "worker.ops.contract")
    assert breaks_a_direction("frontend.completions.tokens", "frontend.served_component")
    assert breaks_a_direction("frontend.server.api", "frontend.routing.router")
    assert not breaks_a_direction("worker.process", "worker.testing.tiny_model")
    assert not breaks_a_direction("frontend.pooling.pooled_call", "frontend.completions.call")
    assert not breaks_a_direction("rl_plane.cli.serve", "frontend.main")
    assert not breaks_a_direction("rl_plane.bus.lock", "rl_plane.protocol.record")


def made_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Writes a small repository, with an `__init__.py` in each folder of a file."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in list(path.relative_to(root).parents)[:-1]:
            (root / folder / "__init__.py").touch()
    return root


def test_an_import_of_a_test_is_found(tmp_path: Path) -> None:
    lines = (
        "import tests.support.paths\nfrom bench import report\ndef late():\n    from examples.fsdp2 import main\n"
    )
    root = made_tree(
        tmp_path, {"worker/one.py": lines, "worker/two.py": "import testing_tools\nimport rl_plane\n"}
    )
    assert imports_into(root, import_graph(root), NOT_PRODUCT) == {
        ("worker.one", "tests.support.paths"),
        ("worker.one", "bench.report"),
        ("worker.one", "examples.fsdp2.main"),
    }


def test_a_top_level_package_without_a_place_is_found(tmp_path: Path) -> None:
    files = {"rl_plane/errors.py": "", "tools/fix.py": "", "plugins/inner/late.py": "", "docs/generate.py": ""}
    root = made_tree(tmp_path, files)
    (root / "plugins/__init__.py").unlink()
    (root / ".hidden").mkdir()
    (root / ".hidden/one.py").touch()
    assert top_level_packages(root) - MAY_IMPORT.keys() - NOT_PRODUCT == {"tools", "plugins"}


def test_an_import_of_another_transport_engine_or_dialect_is_found(tmp_path: Path) -> None:
    wrong = {
        ("rl_plane.transports.http.receiver", "rl_plane.transports.filesystem.receiver"),
        ("rl_plane.transports.nixl.sender", "rl_plane.transports.http"),
        ("rl_plane.transports.base", "rl_plane.transports.ipc.wire"),
        ("rl_plane.fleet.fleet", "rl_plane.transports.group.torch_group"),
        ("worker.engines.vllm.adapter", "worker.engines.sglang.args"),
        ("worker.engines.common.lora", "worker.engines.hf.holder"),
        ("worker.engines.base", "worker.engines.fake.holder"),
        ("frontend.dialects.sglang.groups", "frontend.dialects.vllm.vllm_routes"),
        ("frontend.dialects.vllm.vllm_routes", "frontend.dialects.prime_rl"),
        ("frontend.dialects.common.rpc", "frontend.dialects.prime_rl"),
    }
    right = {
        ("rl_plane.transports.http.receiver", "rl_plane.transports.http.wire"),
        ("rl_plane.transports.http.receiver", "rl_plane.transports.base"),
        ("worker.engines.vllm.adapter", "worker.engines.common.lora"),
        ("worker.process", "worker.engines.base"),
        ("frontend.dialects.prime_rl", "frontend.dialects.common.rpc"),
        *USERS_OF_A_PART,
    }
    assert {one for one in wrong | right if joins_two_parts(*one)} == wrong
    root = made_tree(tmp_path, {"worker/engines/new/adapter.py": "", "worker/engines/common/lora.py": ""})
    assert unlisted_parts(root, "worker.engines") == {"new"}


def test_an_import_that_makes_a_module_impure_is_found(tmp_path: Path) -> None:
    readme = "All files but `coordinator.py` and\n`journal.py` are pure: no clock.\n"
    late = "def late():\n    from rl_plane import bus\n"
    files = {
        "rl_plane/commit/machine.py": "import asyncio\nfrom nats.aio.client import Client\n",
        "rl_plane/commit/rules.py": "import asyncio_tools\nimport rl_plane.business\n",
        "rl_plane/commit/coordinator.py": "import socket\n",
        "rl_plane/commit/journal.py": "import rl_plane.bus.lock\n",
        **{f"{module.replace('.', '/')}.py": late for module in PURE_IN_WORKERS},
    }
    root = made_tree(tmp_path, files)
    (root / "rl_plane/commit/README.md").write_text(readme)
    assert imports_into(root, pure_modules(root), IMPURE) == {
        ("rl_plane.commit.machine", "asyncio"),
        ("rl_plane.commit.machine", "nats.aio.client.Client"),
        *((module, "rl_plane.bus") for module in PURE_IN_WORKERS),
    }


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("importlib.import_module(name)", True),
        ("importlib.import_module('rl_plane.bus.lock')", True),
        ("import_module(f'rl_plane.{name}')", True),
        ("import_module('.lock', 'rl_plane.bus')", True),
        ("__import__('worker')", True),
        ("from importlib import import_module as load", True),
        ("load = importlib.import_module", True),
        ("importlib.import_module('torch.distributed')", False),
        ("from importlib import import_module", False),
        ("importlib.util.find_spec('rl_plane')", False),
    ],
)
def test_an_import_by_a_string_is_found(line: str, found: bool) -> None:
    assert loads_by_name(ast.parse(line)) == found
