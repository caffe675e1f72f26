"""Holds the architecture: who may import whom, and how long files and functions may grow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "lightning_zoffload"

#: Floors from the ground up; within a floor a file may import those named before it.
#: The number is the file's ceiling in lines: split before it passes.
FLOORS: list[dict[str, int]] = [
    {
        "errors": 80,
        "config": 180,
        "trace": 120,
        "layout": 300,
        "loss_scale": 150,
        "lion": 100,
        "checks": 120,
        "machine": 160,
        "kernels": 500,
    },
    {"host_memory": 220, "streams": 120, "transfer": 300, "host_worker": 150},
    {
        "slab": 250,
        "bucket": 300,
        "state_dict": 300,
        "host_update": 200,
        "native_update": 300,
    },
    {
        "placeholder": 120,
        "grad_hooks": 350,
        "takeover": 300,
        "schedules": 350,
        "engine": 350,
        "inspection": 120,
        "optimizer": 250,
    },
    {"precision": 300, "strategy": 350, "registration": 100, "__init__": 40},
]
ORDER = [name for floor in FLOORS for name in floor]
CEILINGS = {name: lines for floor in FLOORS for name, lines in floor.items()}
#: Fabric and Pytorch Lightning may be imported on this floor only.
LIGHTNING_FLOOR = FLOORS[-1]
LONGEST_FUNCTION = 60


def imports_of(name: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_file_has_a_floor() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_downwards_only(name: str) -> None:
    prefix = "lightning_zoffload."
    ours = {i[len(prefix) :].split(".")[0] for i in imports_of(name) if i.startswith(prefix)}
    above = ours & set(ORDER[ORDER.index(name) :])
    assert not above, f"{name} imports {above} from its own height or above"


@pytest.mark.parametrize("name", [n for n in ORDER if n not in LIGHTNING_FLOOR])
def test_only_the_top_floor_knows_lightning(name: str) -> None:
    foreign = {i for i in imports_of(name) if i.split(".")[0] in ("lightning", "torchmetrics")}
    assert not foreign


@pytest.mark.parametrize("name", [n for n in ORDER if n != "kernels"])
def test_only_kernels_touches_the_compiled_module(name: str) -> None:
    assert not {i for i in imports_of(name) if "_native" in i or i.split(".")[0] == "cffi"}


@pytest.mark.parametrize("name", ORDER)
def test_files_stay_under_their_ceiling(name: str) -> None:
    lines = len((PACKAGE / f"{name}.py").read_text().splitlines())
    assert lines <= CEILINGS[name], f"{name}.py has {lines} lines, its ceiling is {CEILINGS[name]}"


def lines_without_docstring(function: ast.FunctionDef) -> int:
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return lines


@pytest.mark.parametrize("name", ORDER)
def test_functions_stay_short(name: str) -> None:
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lengths = {function.name: lines_without_docstring(function) for function in functions}
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION}


@pytest.mark.parametrize("name", ORDER)
def test_users_errors_are_raised_and_not_asserted(name: str) -> None:
    """``assert`` is for narrowing an Optional for the type checker, nothing else."""
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            text = ast.unparse(node.test)
            assert text.endswith("is not None"), f"{name}:{node.lineno}: assert {text}"


def test_the_engine_stays_small() -> None:
    tree = ast.parse((PACKAGE / "engine.py").read_text())
    (engine,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "OffloadEngine")
    public = [
        n.name for n in engine.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")
    ]
    attributes = {
        n.attr
        for n in ast.walk(engine)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
    }
    assert len(public) <= 12, public
    assert len(attributes) <= 15, attributes
