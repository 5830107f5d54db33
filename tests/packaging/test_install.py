"""What a user gets: the wheel, a wheel built from the sdist, and an editable install.

Each is installed into an environment of its own and looked at from another folder, because in the
repository root Python finds ./rtc before anything that is installed. Nothing is downloaded, and the
sources are built in a copy: setuptools leaves build/ behind and would ship its stale files.
"""

import email
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("passes", "model", "kernels", "graphs")
PACKAGES = ("rtc", "rtc.testing", *(f"rtc.{folder}" for folder in FOLDERS))

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not all(map(find_spec, ("pip", "setuptools"))), reason="no pip, setuptools"),
]


def run(*command: object, cwd: Path) -> str:
    """Run a command, and return what it printed; the test fails with its stderr if it fails."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def pip(*arguments: object, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


def build_wheel(source: Path, folder: Path) -> Path:
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip("wheel", *options, "--wheel-dir", folder, source, cwd=folder.parent)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is needed to build, as in a fresh clone."""
    copy = tmp_path_factory.mktemp("checkout")
    junk = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "results")
    for name in ("rtc", *FOLDERS, "tests", "bench"):
        shutil.copytree(ROOT / name, copy / name, ignore=junk)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def sdist_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built the way pip does it: the archive is unpacked elsewhere and built there."""
    work = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(work)!r})"
    run(sys.executable, "-c", build, cwd=source)
    (archive,) = work.glob("*.tar.gz")
    return build_wheel(archive, work / "dist")


@dataclass(frozen=True)
class Installed:
    """An environment with rtc installed: its `bin` and where it must find rtc's folders."""

    bin: Path
    folders: dict[str, Path]

    def python(self, code: str, cwd: Path) -> str:
        return run(self.bin / "python", "-c", code, cwd=cwd)


@pytest.fixture(scope="module", params=["wheel", "sdist", "editable"])
def installed(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    env = tmp_path_factory.mktemp(f"env-{request.param}")
    venv.create(env, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": env, "platbase": env}))
    # torch and setuptools come from the environment of the tests: its folder, last on sys.path. The
    # .pth files in there are not read, so an editable install of rtc there is not seen.
    (site / "zz-outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if request.param == "editable":
        what, options = ["--editable", source], ["--no-build-isolation"]
        folders = {"rtc": source / "rtc", **{f"rtc.{name}": source / name for name in FOLDERS}}
    else:
        fixture = {"wheel": "wheel", "sdist": "sdist_wheel"}[request.param]
        what, options = [request.getfixturevalue(fixture)], []
        folders = {"rtc": site / "rtc", **{f"rtc.{name}": site / "rtc" / name for name in FOLDERS}}
    options += ["--no-index", "--no-deps", "--ignore-installed"]
    pip("--python", env / "bin" / "python", "install", *options, *what, cwd=env)
    return Installed(env / "bin", folders)


LOCATE = f"""
import importlib, json, pathlib
where = lambda name: str(pathlib.Path(importlib.import_module(name).__file__).resolve().parent)
print(json.dumps({{name: where(name) for name in {PACKAGES}}}))
"""


def located(output: str) -> dict[str, Path]:
    return {name: Path(path) for name, path in json.loads(output.splitlines()[-1]).items()}


def test_packages_import_from_another_folder(installed: Installed, tmp_path: Path) -> None:
    found = located(installed.python(LOCATE, cwd=tmp_path))
    folders = {name: path.resolve() for name, path in installed.folders.items()}
    assert {name: found[name] for name in folders} == folders


@pytest.mark.parametrize("checkout", ["its own", "another"])
def test_packages_import_in_a_checkout(installed: Installed, source: Path, checkout: str) -> None:
    """There ./rtc shadows whatever is installed, and its neighbours must come along.

    An editable install of one checkout must not lend its folders to another one.
    """
    root = (source if checkout == "its own" else ROOT).resolve()
    found = located(installed.python(LOCATE, cwd=root))
    assert found["rtc"] == root / "rtc"
    assert {name: found[f"rtc.{name}"] for name in FOLDERS} == {
        name: root / name for name in FOLDERS
    }


def test_only_rtc_is_importable(installed: Installed, tmp_path: Path) -> None:
    """No `kernels`, no `model`; nor `rtc.tests`, or a second rtc inside the first."""
    names = [*FOLDERS, "tests", "bench", "rtc.rtc", "rtc.tests", "rtc.bench"]
    code = f"""
import importlib.util, rtc
for name in {names}:
    spec = importlib.util.find_spec(name)
    print(name, spec and spec.origin)
"""
    ours = (str(installed.bin.parent), str(installed.folders["rtc"].parent))
    found = dict(line.split(" ", 1) for line in installed.python(code, cwd=tmp_path).splitlines())
    assert found.keys() == set(names)
    assert not [name for name, origin in found.items() if origin.startswith(ours)]


def test_entry_points_load(installed: Installed, tmp_path: Path) -> None:
    """The torch.compile backend, the pytest plugin and the command: names and targets."""
    loaded = installed.python(
        """
from importlib.metadata import distribution
for entry in distribution("rtc-compile").entry_points:
    assert callable(entry.load()) or entry.group == "pytest11", entry
    print(entry.group, entry.name)
""",
        cwd=tmp_path,
    )
    expected = {"console_scripts rtc", "torch_dynamo_backends rtc", "pytest11 rtc"}
    assert set(loaded.splitlines()) >= expected
    assert "usage" in run(installed.bin / "rtc", "--help", cwd=tmp_path).lower()


def test_versions_agree(installed: Installed, tmp_path: Path) -> None:
    version = (
        "import rtc, importlib.metadata as m; print(rtc.__version__, m.version('rtc-compile'))"
    )
    assert installed.python(version, cwd=tmp_path).split() == [PROJECT["version"]] * 2


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_has_every_file_and_no_other(source: Path, wheel: Path) -> None:
    """Sources, READMEs, C++, tables: if a kind of file is missing, add it to package-data."""
    expected = {
        (file.relative_to(source) if top == "rtc" else Path("rtc", file.relative_to(source)))
        for top in ("rtc", *FOLDERS)
        for file in (source / top).rglob("*")
        if file.is_file()
    }
    assert names_in(wheel) == {path.as_posix() for path in expected}
    assert "rtc/py.typed" in names_in(wheel)


def test_sdist_gives_the_same_wheel(wheel: Path, sdist_wheel: Path) -> None:
    assert names_in(sdist_wheel) == names_in(wheel)


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())
    assert "torch<2.15,>=2.11" in metadata.get_all("Requires-Dist", [])
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert metadata["License-Expression"] == PROJECT["license"]
