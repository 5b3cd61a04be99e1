"""The structure of the package: which part imports which, no import cycles, no class name used twice."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "epee"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Parts import from rows above their own, never from their own or from below (docs/design.md, "Parts").
LAYERS = (
    {"errors"},
    {"torch_private"},
    {"arrays", "descriptors", "env", "profiling", "threads", "untraced", "values"},
    {"memory", "jit", "log"},
    {"view"},
    {"link"},
    {"engine"},
    {"gpu"},
    {"backend"},
    {"ep"},
    {"nn", "compat", "doctor"},
    {"demo"},
    {"cli"},
)
NEIGHBOURS = {frozenset({"memory", "jit"})}  # kernels are loaded for memory, and their structs describe it
ALONE = {"reference"}  # the oracle imports nothing of what it checks
FRONT = {"__init__", "__main__"}  # the public names
# the module whose class its parts name in annotations, by imports under TYPE_CHECKING
OWNERS = {"engine.engine"}
MAX_IN_CIRCLES = 11  # modules that import each other if imports for annotations count; it only falls
# What drop-in layers import of other parts: front rooms, nothing behind them (`epee.ep.__all__` has the names).
FRONT_ROOMS_FOR_COMPAT = {"errors", "env", "untraced", "values", "ep", "backend"}


def module_of(path: Path) -> str:
    """Return the dotted name of a source, without `epee.`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


def imports_of(path: Path, *, skips_owners: bool = False) -> Iterator[str]:
    """Yield the modules of epee that a source imports, wherever in it; without `OWNERS` for types alone if asked."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    tree = ast.parse(path.read_text())
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {id(inner) for guard in guards for inner in ast.walk(guard)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *(node.module or "").split("."))).strip(".")
            names = [f"{stem}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            inner = name.removeprefix("epee.")
            found = inner if inner in MODULES else inner.rpartition(".")[0] or "__init__"
            if name.startswith("epee.") and not (skips_owners and found in OWNERS and id(node) in for_types):
                yield found


def part_of(module: str) -> str:
    """Return the part of epee that a module belongs to."""
    return module.split(".")[0]


def test_every_part_has_its_place_and_every_place_its_part() -> None:
    assert {part_of(name) for name in MODULES} == set().union(*LAYERS) | ALONE | FRONT


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_upwards_only(name: str) -> None:
    part = part_of(name)
    if part in FRONT:
        return
    allowed = {part}
    for layer in LAYERS:
        if part in layer:
            allowed |= {other for other in layer if frozenset({part, other}) in NEIGHBOURS}
            break
        allowed |= layer if part not in ALONE else set()
    assert {part_of(found) for found in imports_of(MODULES[name])} <= allowed


def beyond_front_rooms(path: Path) -> set[str]:
    """Return the modules of other parts that a source of `compat` imports and must not."""
    return {found for found in imports_of(path) if part_of(found) != "compat"} - FRONT_ROOMS_FOR_COMPAT


@pytest.mark.parametrize("name", [name for name in MODULES if part_of(name) == "compat"])
def test_a_drop_in_layer_imports_no_internals(name: str) -> None:
    assert beyond_front_rooms(MODULES[name]) == set()


@pytest.mark.parametrize(
    ("line", "deeper"),
    [
        ("from epee.ep.handle import Payload", {"ep.handle"}),
        ("from ...ep.pool.pool import BufferPool", {"ep.pool.pool"}),
        ("from epee.ep import config", {"ep.config"}),
        ("import epee.memory.layout", {"memory.layout"}),
        ("from epee.memory import signals", {"memory.signals"}),
        ("def late():\n    from ...backend.options import MAX_RANKS", {"backend.options"}),
        ("from epee.ep import Payload, BufferPool", set()),
        ("from ...errors import InvalidArgument", set()),
    ],
)
def test_a_deeper_import_of_a_drop_in_layer_is_found(
    line: str, deeper: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "epee" / "compat" / "mooncake" / "new.py"
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert beyond_front_rooms(path) == deeper


def test_the_front_room_of_ep_offers_what_others_use_and_no_more() -> None:
    offered = set(importlib.import_module("epee.ep").__all__)
    sources = [path for name, path in MODULES.items() if part_of(name) in ("compat", "__init__")]
    wanted = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in ("epee.ep", "ep"):
                wanted |= {alias.name for alias in node.names}
    assert wanted == offered


def test_the_front_room_of_the_engine_offers_what_others_use_and_no_more() -> None:
    others = [path for name, path in MODULES.items() if part_of(name) != "engine"]
    behind = {found for path in others for found in imports_of(path)}
    assert {found for found in behind if found == "engine.engine" or found.startswith("engine.bootstrap")} == set()
    wanted = set()
    for path in others:
        package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "engine" and node.level == package.count(".") + 1:
                wanted |= {alias.name for alias in node.names}
    assert wanted == set(importlib.import_module("epee.engine").__all__)


def circles(*, skips_owners: bool) -> set[frozenset[str]]:
    """Return the groups of modules that import each other (Tarjan's strongly connected components)."""
    edges = {
        name: {found for found in imports_of(path, skips_owners=skips_owners) if found in MODULES} - {name}
        for name, path in MODULES.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            found.add(frozenset(stack[place:]))
            del stack[place:]

    for name in edges:
        if name not in index:
            visit(name)
    return {group for group in found if len(group) > 1}


def test_no_modules_import_each_other() -> None:
    assert circles(skips_owners=True) == set()


def test_no_more_modules_name_each_others_classes() -> None:
    found = circles(skips_owners=False)
    assert sum(map(len, found)) <= MAX_IN_CIRCLES, found


def test_a_class_has_its_name_for_itself() -> None:
    """Drop-in layers bear other libraries' names, so they are left out."""
    places: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and part_of(name) != "compat":
                places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
