"""The layout: imports point one way, and every folder of the packages is shipped."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Folder -> what of `rtc` it may import. model and kernels know nobody; passes call kernels; graphs
# capture and replay any callable. rtc puts them together and is not restricted.
MAY_IMPORT = {
    "model": {"rtc.model"},
    "kernels": {"rtc.kernels"},
    "passes": {"rtc.passes", "rtc.kernels"},
    "graphs": {"rtc.graphs"},
}
FOLDERS = {"rtc": "rtc", **{f"rtc.{folder}": folder for folder in MAY_IMPORT}}


def module_name(file: Path) -> str:
    """passes/analysis/slots.py -> rtc.passes.analysis.slots; a package keeps its `__init__`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "rtc" else ("rtc", *parts))


def imported_modules(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute dotted name) for every import, wherever in the file it stands.

    `from a import b` yields `a.b`: it imports the submodule if there is one, and for a mere name
    the extra part does not change which package is meant.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(source: str, module: str, allowed: set[str]) -> list[str]:
    return [
        f"line {line}: {name}"
        for line, name in imported_modules(source, module)
        if is_within(name, "rtc") and not any(is_within(name, package) for package in allowed)
    ]


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_imports_point_one_way(folder: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}, {what}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for what in violations(file.read_text(), module_name(file), MAY_IMPORT[folder])
    ]
    assert not found, f"{folder}/ may import only {sorted(MAY_IMPORT[folder])}:\n" + "\n".join(
        found
    )


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import rtc", "rtc"),
        ("import rtc.errors as e", "rtc.errors"),
        ("from rtc import errors", "rtc.errors"),
        ("from rtc.model import build", "rtc.model.build"),
        ("from .. import errors", "rtc.errors"),
        ("from ..model.rope import table", "rtc.model.rope.table"),
        ("def f():\n    from rtc.runtime import state", "rtc.runtime.state"),
    ],
)
def test_every_spelling_of_an_import_is_seen(statement: str, name: str) -> None:
    assert [found for _, found in imported_modules(statement, "rtc.passes.ring_cache")] == [name]
    assert violations(statement, "rtc.passes.ring_cache", {"rtc.passes", "rtc.kernels"})


def test_relative_imports_inside_a_package_are_allowed() -> None:
    source = "from . import graph\nfrom .analysis import slots\nfrom ..kernels import rope"
    assert not violations(source, "rtc.passes.ring_cache", {"rtc.passes", "rtc.kernels"})
    assert not violations("from . import analysis", "rtc.passes.__init__", {"rtc.passes"})


def test_nobody_imports_a_folder_as_a_top_level_package() -> None:
    """`import kernels` works by accident in the repository root, and nowhere else."""
    folders = [*FOLDERS.values(), "tests", "bench"]
    found = [
        f"{file.relative_to(ROOT)}, line {line}: {name}"
        for folder in folders
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, name in imported_modules(file.read_text(), module_name(file))
        if name.partition(".")[0] in MAY_IMPORT
    ]
    assert not found, "import it as rtc.<folder>:\n" + "\n".join(found)


def test_every_package_is_shipped() -> None:
    found = {
        ".".join([package, *directory.relative_to(ROOT / folder).parts]): directory
        for package, folder in FOLDERS.items()
        for directory in {file.parent for file in (ROOT / folder).rglob("*.py")}
    }
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    assert not found.keys() - listed, "add them to [tool.setuptools] packages in pyproject.toml"
    assert not listed - found.keys(), "[tool.setuptools] packages lists what does not exist"
    bare = [name for name, directory in found.items() if not (directory / "__init__.py").is_file()]
    assert not bare, "no __init__.py"


def test_package_dir_names_the_folders() -> None:
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == FOLDERS
