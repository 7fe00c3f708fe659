"""Imports point one way, the judge shares nothing with what it judges, and `import ropegrad` stays light."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import need

import ropegrad

PACKAGE = Path(ropegrad.__file__).resolve().parent

# A module imports only from layers above its own line; those that share a line do not know each other.
# "ropegrad" alone is the package's __init__, the public names.
LAYERS = (
    ("errors",),
    ("arrays",),
    ("spec",),
    ("cost", "tiles", "suites", "calls", "outputs"),
    ("maths",),
    ("backends",),
    ("repeats", "info", "packed"),
    ("plan", "qkv_plan"),
    ("api", "positions"),
    ("ropegrad",),
    ("interop",),
    ("verify",),
    ("records",),
    ("bench",),
    ("report",),
    ("target_report",),
    ("terminal", "target_terminal"),
    ("fuzz_terminal",),
    ("cli",),
    ("__main__",),
)
PLACE = {name: i for i, layer in enumerate(LAYERS) for name in layer}
OF_NUMBA = tuple(  # they cannot do without it
    f"ropegrad.backends.numba_{name}" for name in ("kernel", "memory", "numbers", "rows")
)
HEAVY = (
    "torch",
    "jax",
    "cupy",
    "dask",
    "numba",
    "matplotlib",
    "hypothesis",
    "rich",
    "cyclopts",
    "transformers",
)
JUDGE = ("oracle", "products", "exact", "sums", "doubledouble", "bounds", "judge")


@cache
def modules():
    """The package's modules by dotted name, parsed."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(name, *, at_once=False):
    """Dotted names of what a module imports: anywhere in it, or at once, when it is loaded itself."""
    tree = modules()[name]
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() else node.module


def own(names):
    return {name for name in names if name.partition(".")[0] == "ropegrad"}


def layer(name):
    return name.split(".")[1] if "." in name else name


def wrong_way():
    """Every import that does not point up, as a sentence."""
    for name in modules():
        for other in own(imports(name)):
            mine, theirs = layer(name), layer(other)
            if mine != theirs and PLACE[theirs] >= PLACE[mine]:
                yield f"{name} imports {other}: {mine} stands before or beside {theirs}"


def test_every_module_has_a_place():
    unknown = {name for name in modules() if layer(name) not in PLACE}
    assert not unknown, f"give these a place in LAYERS: {sorted(unknown)}"


def test_imports_point_one_way():
    assert not list(wrong_way())


def test_the_only_imports_of_maths_are_arrays_and_the_standard_library():
    for name in modules():
        if layer(name) == "maths":
            for other in imports(name):
                top = other.partition(".")[0]
                assert (
                    layer(other) in ("maths", "arrays")
                    if top == "ropegrad"
                    else top in sys.stdlib_module_names
                )


def test_the_core_needs_three_packages():
    """Backends may import what they are made of, the layers below what they show or check with."""
    core = {
        name for name in modules() if PLACE[layer(name)] <= PLACE["ropegrad"] and layer(name) != "backends"
    }
    outside = {
        other.partition(".")[0] for name in core for other in imports(name, at_once=True)
    } - sys.stdlib_module_names
    assert outside <= {"ropegrad", "numpy", "array_api_compat", "ml_dtypes"}


def test_no_two_modules_import_each_other():
    waiting = {name: own(imports(name)) - {name} for name in modules()}
    while ready := [name for name, others in waiting.items() if not others & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert not waiting, f"these import each other: {sorted(waiting)}"


def test_the_judge_shares_no_code_with_what_it_judges():
    reached, ahead = set(), {f"ropegrad.verify.{name}" for name in JUDGE}
    while ahead:
        name = ahead.pop()
        reached.add(name)
        ahead |= own(imports(name)) - reached
    allowed = {"errors", "arrays", "spec", "verify"}
    assert {layer(name) for name in reached} == allowed
    assert not {name for name in reached if name.split(".")[-1] in ("runners", "check")}


# ---- what the formulas are written in ----------------------------------------------------------------------


def without_docstrings(tree):
    """The code alone: comments are gone already."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def test_maths_names_no_backend():
    for path in (PACKAGE / "maths").glob("*.py"):
        code = without_docstrings(ast.parse(path.read_text(encoding="utf-8"))).lower()
        assert not [word for word in (*HEAVY, "numpy") if word in code], path.name


def test_maths_uses_the_array_api_only():
    strict = need("array_api_strict", "test")
    of_arrays = {"T", "shape", "dtype", "device"}
    for name in modules():
        if layer(name) != "maths":
            continue
        for node in ast.walk(modules()[name]):
            if not isinstance(node, ast.Attribute):
                continue
            of = node.value.id if isinstance(node.value, ast.Name) else None
            if of == "xp":
                assert hasattr(strict, node.attr), f"{name}: xp.{node.attr} is not in the array API"
            elif of != "math":
                assert node.attr in of_arrays, f"{name}: .{node.attr} is not of every array"


# ---- import ropegrad ---------------------------------------------------------------------------------------

PROBE = """
import sys, time
start = time.process_time()
import ropegrad
seconds = time.process_time() - start
print(seconds, *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def import_afresh():
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds, *loaded = done.stdout.split()
    return float(seconds), set(loaded)


def test_import_is_quick_and_loads_nothing_heavy():
    runs = [import_afresh() for _ in range(3)]
    assert not runs[0][1] & set(HEAVY)
    assert {"numpy", "ropegrad"} <= runs[0][1]
    assert min(seconds for seconds, _ in runs) < 1


def test_all_is_every_public_name():
    names = {n for n, v in vars(ropegrad).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert ropegrad.__all__ == sorted(names)


@pytest.mark.parametrize("name", ropegrad.__all__)
def test_public_names_are_documented(name):
    text = getattr(ropegrad, name).__doc__
    assert text
    assert not text.startswith(f"{name}("), "the docstring is what the decorator made"


def test_every_module_can_be_imported_and_says_what_it_is():
    for name, tree in sorted(modules().items(), key=lambda item: item[0] in OF_NUMBA):
        assert ast.get_docstring(tree), f"{name} has no docstring"
        if layer(name) in PLACE and PLACE[layer(name)] <= PLACE["ropegrad"]:
            if name in OF_NUMBA:
                need("numba", "cpu")
            importlib.import_module(name)
