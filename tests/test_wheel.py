"""The wheel holds what it should, and works where there is nothing but it and its declared dependencies."""

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import skip

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command, cwd, **variables):
    """Status and output of a command that cannot import from the checkout by way of the environment."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def succeed(*command, cwd, **variables):
    status, output = run(*command, cwd=cwd, **variables)
    assert status == 0, output
    return output


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from the checkout with the hatchling that is installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    succeed(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    [path] = folder.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_its_metadata_only(wheel):
    package = ROOT / "ropegrad"
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    info = f"ropegrad-{PROJECT['version']}.dist-info"
    metadata = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "ropegrad/py.typed" in names
    assert names == {str(path.relative_to(ROOT)) for path in files} | metadata | {f"{info}/licenses/LICENSE"}


def test_wheel_declares_the_dependencies_of_pyproject(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        lines = archive.read(name).decode().splitlines()
    declared = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    assert {line for line in declared if "extra ==" not in line} == set(PROJECT["dependencies"])
    assert f"Requires-Python: {PROJECT['requires-python']}" in lines


def test_installed_wheel_works_outside_the_checkout(wheel, tmp_path):
    """One test, not three: parallel workers would each install their own."""
    venv.create(tmp_path / "env", with_pip=True)
    folder = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    python, elsewhere = folder / "python", tmp_path / "elsewhere"
    elsewhere.mkdir()
    need_network(python, elsewhere)
    succeed(python, "-m", "pip", "install", "--quiet", wheel, cwd=elsewhere)
    origin = succeed(python, "-c", "import ropegrad; print(ropegrad.__file__)", cwd=elsewhere)
    assert Path(origin.strip()).is_relative_to(tmp_path / "env")
    assert PROJECT["version"] in succeed(folder / "ropegrad", "info", cwd=elsewhere)
    succeed(folder / "ropegrad", "verify", "--quick", cwd=elsewhere)
    assert list(elsewhere.iterdir()) == []


def need_network(python, folder):
    """Skip where pip reaches no package index: asked for one small package, not for our dependencies."""
    command = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "pathspec"]
    status, output = run(*command, cwd=folder, PIP_RETRIES="0", PIP_DEFAULT_TIMEOUT="15")
    if status:
        last = (output.splitlines() or ["no output"])[-1]
        skip(f"needs a network with a package index: {last}")
