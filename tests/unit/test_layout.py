"""The product's imports: packages import downwards only, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


def module_name(path: Path) -> str:
    """The dotted name of a file below ROOT."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields all imports, also those inside functions and under `if TYPE_CHECKING`."""
    return (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))


@cache
def import_graph() -> dict[str, set[str]]:
    """Module → the modules of the product that it imports. A package that is imported only on the way to a module in it
    is left out: the import of `a.b` means `a.b`."""
    files = [path for top in MAY_IMPORT for path in sorted((ROOT / top).rglob("*.py"))]
    modules = {module_name(path): path for path in files}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found: set[str] = set()
        for node in imports_of(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
                continue
            assert node.level == 0, f"{name} imports relatively"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
        graph[name] = (found & modules.keys()) - {name}
    return graph


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


def test_a_cycle_a_lazy_import_and_an_import_of_a_type_are_found() -> None:
    hidden = ast.parse("def late():\n    import a.b\n\nif TYPE_CHECKING:\n    import c\n")
    assert {ast.unparse(node) for node in imports_of(hidden)} == {"import a.b", "import c"}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}


def test_an_upward_and_a_sideways_import_are_found() -> None:
    assert breaks_a_direction("rl_plane.protocol.record", "rl_plane.bus.lock")
    assert breaks_a_direction("rl_plane.bus.lock", "rl_plane.weights.manifest")
    assert breaks_a_direction("worker.worker", "frontend.main")
    assert breaks_a_direction("worker.nodes.node_process", "worker.engines.capabilities")
    assert breaks_a_direction("worker.worker", "worker.testing.phase_hooks")
    assert breaks_a_direction("worker.generation_service", "worker.ops.contract")
    assert breaks_a_direction("frontend.completions.tokens", "frontend.served_component")
    assert breaks_a_direction("frontend.server.api", "frontend.routing.router")
    assert not breaks_a_direction("worker.process", "worker.testing.phase_hooks")
    assert not breaks_a_direction("frontend.pooling.pooled_call", "frontend.completions.call")
    assert not breaks_a_direction("rl_plane.cli.serve", "frontend.main")
    assert not breaks_a_direction("rl_plane.bus.lock", "rl_plane.protocol.record")
