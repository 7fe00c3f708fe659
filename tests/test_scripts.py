"""What scripts/ and .ci/run promise, with stand-ins for pip and the tools, so that a start takes no time."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["scripts/bootstrap.py", "scripts/verify", "scripts/test"]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="uses symbolic links and POSIX signals")

# A tool that notes how it was called, then does as told: STUB_pip=3 exits 3, STUB_pip=hang stays a while.
STUB = """
import json, os, signal, sys, time

def note(*what):
    with open(os.environ["STUB_LOG"], "a") as log:
        log.write(json.dumps(what) + "\\n")

def play(name):
    note(name, sys.argv[1:], os.getcwd(), os.getpid())
    told = os.environ.get("STUB_" + name, "0")
    if told == "hang":
        time.sleep(float(os.environ["STUB_SECONDS"]))
    if told == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    note(name + " ended")
    sys.exit(int(told) if told.isdigit() else 0)
"""
STUB_TOOL = "import stub\nif __name__ == '__main__':\n    stub.play('{name}')\n"
STUB_VENV = """
import os, stub, sys
if __name__ == "__main__":
    folder = sys.argv[1]
    os.mkdir(folder + "/bin")
    os.symlink(sys._base_executable, folder + "/bin/python")
    with open(folder + "/pyvenv.cfg", "w") as config:
        config.write("home = " + os.path.dirname(sys._base_executable) + "\\n")
        config.write("include-system-site-packages = false\\n")
    stub.play("venv")
"""


@dataclass
class Checkout:
    """A copy of the scripts, in a folder with a space in its name, and stand-ins for all that they start."""

    root: Path
    aside: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def stamp(self):
        return json.loads((self.venv / "ropegrad.json").read_text())

    def command(self, script, *arguments):
        return [sys.executable, str(self.root / script), *arguments]

    def environment(self, **told):
        return self.env | {"STUB_" + name: str(what) for name, what in told.items()}

    def start(self, script, *arguments, **told):
        return finish(self.launch(self.command(script, *arguments), **told))

    def launch(self, command, **told):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(command, env=self.environment(**told), cwd=self.aside, text=True, **pipes)

    def launch_hanging(self, script, seconds=60):
        """A start whose pip has begun and will not end for so many seconds."""
        before = len(self.calls("pip"))
        started = self.launch(self.command(script), pip="hang", SECONDS=seconds)
        deadline = time.monotonic() + 20
        while len(self.calls("pip")) == before:
            assert started.poll() is None, started.communicate()
            assert time.monotonic() < deadline, "pip was not started"
            time.sleep(0.02)
        return started

    def log(self):
        path = self.aside / "log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def calls(self, name):
        return [line[1] for line in self.log() if line[0] == name]

    def installed(self):
        """The targets of all pip calls so far."""
        return [arguments[-1] for arguments in self.calls("pip")]


def finish(process):
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def refusal(done):
    """The last line of a start that must have been refused, politely."""
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ropegrad: ")
    assert "; " in last, "what is wrong; what to do"
    return last


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc/self").exists() else True


@pytest.fixture
def checkout(tmp_path):
    root, aside = tmp_path / "a checkout", tmp_path / "aside"
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / ".ci", root / ".ci")
    shutil.copy(ROOT / "pyproject.toml", root)
    stubs = aside / "stubs"
    stubs.mkdir(parents=True)
    (stubs / "stub.py").write_text(STUB)
    (stubs / "venv.py").write_text(STUB_VENV)
    for name in ("pip", "ruff", "mypy", "pytest", "ropegrad"):
        (stubs / f"{name}.py").write_text(STUB_TOOL.format(name=name))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(stubs), "STUB_LOG": str(aside / "log")}
    return Checkout(root, aside, env)


# The inner command.


@pytest.mark.parametrize("status", [0, 1, 7])
def test_verify_returns_the_inner_status(checkout, status):
    assert checkout.start("scripts/verify", ropegrad=status).returncode == status


def test_verify_ends_by_the_signal_that_ends_the_inner_command(checkout):
    assert checkout.start("scripts/verify", ropegrad="die").returncode == -signal.SIGKILL


def test_verify_passes_arguments_on_and_stays_in_the_users_folder(checkout):
    arguments = ["--json", "a b.json", "", "*", "--help"]
    checkout.start("scripts/verify", *arguments)
    name, given, folder, _ = checkout.log()[-2]
    assert (name, given) == ("ropegrad", ["verify", *arguments])
    assert folder == str(checkout.aside)


def test_verify_imports_nothing_from_the_users_folder(checkout):
    (checkout.aside / "ropegrad.py").write_text("raise SystemExit(99)")
    assert checkout.start("scripts/verify").returncode == 0


def test_works_through_a_symbolic_link(checkout):
    link = checkout.aside / "link"
    link.symlink_to(checkout.root / "scripts/verify")
    assert finish(checkout.launch([sys.executable, str(link)])).returncode == 0
    assert checkout.stamp["checkout"] == str(checkout.root)


# Installing once.


def test_first_start_says_in_one_line_what_it_does(checkout):
    done = checkout.start("scripts/verify")
    assert len(done.stderr.splitlines()) == 1
    assert "installing ropegrad into .venv" in done.stderr
    assert done.stdout == ""


def test_installs_by_name_only(checkout):
    checkout.start("scripts/test")
    assert checkout.installed() == [".[test]"]
    assert not any("://" in argument for argument in checkout.calls("pip")[0])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for names in (project["dependencies"], *project["optional-dependencies"].values()):
        assert not any("@" in name or "/" in name for name in names)


def test_second_start_is_quick_silent_and_starts_neither_venv_nor_pip(checkout):
    checkout.start("scripts/verify")
    begun = time.monotonic()
    done = checkout.start("scripts/verify", "--help", pip=1, venv=1)
    assert time.monotonic() - begun < 2
    assert (done.returncode, done.stderr) == (0, "")
    assert len(checkout.calls("venv")) == len(checkout.calls("pip")) == 1


def test_test_extends_what_verify_made_and_verify_leaves_it(checkout):
    checkout.start("scripts/verify")
    checkout.start("scripts/test")
    checkout.start("scripts/verify")
    assert checkout.installed() == [".", ".[test]"]
    assert len(checkout.calls("venv")) == 1


def test_bootstrap_adds_extras(checkout):
    checkout.start("scripts/bootstrap.py", "test", "cpu")
    assert checkout.start("scripts/bootstrap.py", "dask").returncode == 0
    assert checkout.installed() == [".[cpu,test]", ".[cpu,dask,test]"]


def test_bootstrap_refuses_an_unknown_extra(checkout):
    assert "'dusk'" in refusal(checkout.start("scripts/bootstrap.py", "dusk"))
    assert not checkout.venv.exists()


def test_changed_pyproject_installs_again_into_the_same_environment(checkout):
    checkout.start("scripts/test")
    with open(checkout.root / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    checkout.start("scripts/verify")
    assert checkout.installed() == [".[test]", ".[test]"]
    assert len(checkout.calls("venv")) == 1


def test_two_starts_at_once_install_once(checkout):
    first = checkout.launch_hanging("scripts/verify", seconds=0.5)
    second = checkout.start("scripts/verify")
    assert finish(first).returncode == second.returncode == 0
    assert "waiting for another start" in second.stderr
    assert len(checkout.calls("pip")) == 1


# Environments that cannot be used as they are.


def test_moved_checkout_is_made_anew_with_the_extras_it_had(checkout):
    checkout.start("scripts/test")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    done = checkout.start("scripts/verify")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1)
    assert checkout.installed() == [".[test]", ".[test]"]
    assert len(checkout.calls("venv")) == 2
    assert checkout.stamp["checkout"] == str(checkout.root)


def test_vanished_base_interpreter_is_made_anew(checkout):
    checkout.start("scripts/verify")
    python = checkout.venv / "bin/python"
    python.unlink()
    python.symlink_to("/gone/python3")
    assert checkout.start("scripts/verify").returncode == 0
    assert len(checkout.calls("venv")) == 2


def test_killed_install_is_made_anew_once_its_pip_has_ended(checkout):
    started = checkout.launch_hanging("scripts/verify", seconds=1)
    started.kill()
    finish(started)
    done = checkout.start("scripts/verify")
    assert done.returncode == 0
    assert "half-made" in done.stderr
    names = [name for name, *_ in checkout.log() if name.startswith("pip")]
    assert names == ["pip", "pip ended"] * 2
    assert len(checkout.calls("venv")) == 2


def test_killed_extension_is_made_anew(checkout):
    checkout.start("scripts/verify")
    started = checkout.launch_hanging("scripts/test", seconds=1)
    started.kill()
    finish(started)
    assert checkout.start("scripts/verify").returncode == 0
    assert checkout.installed() == [".", ".[test]", ".[test]"]
    assert len(checkout.calls("venv")) == 2


def own_environment(checkout):
    """An environment that the scripts did not make."""
    checkout.venv.mkdir(parents=True)
    command = [sys.executable, "-m", "venv", str(checkout.venv)]
    subprocess.run(command, env=checkout.env, check=True)
    (checkout.venv / "mine").touch()


def test_the_users_own_environment_is_installed_into_even_after_a_move(checkout):
    own_environment(checkout)
    assert checkout.start("scripts/verify").returncode == 0
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert checkout.start("scripts/verify").returncode == 0
    assert checkout.installed() == [".", "."]
    assert (checkout.venv / "mine").exists()


def test_failed_install_leaves_the_users_own_environment_alone(checkout):
    own_environment(checkout)
    refusal(checkout.start("scripts/verify", pip=1))
    assert sorted(os.listdir(checkout.venv)) == ["bin", "mine", "pyvenv.cfg"]


def test_the_users_own_environment_is_replaced_if_its_python_is_too_old(checkout):
    own_environment(checkout)
    python = checkout.venv / "bin/python"
    python.unlink()
    python.write_text(f"#!/bin/sh\necho '3 9'\necho '{checkout.venv}'\n")
    python.chmod(0o755)
    assert checkout.start("scripts/verify").returncode == 0
    assert not (checkout.venv / "mine").exists()


def test_an_environment_without_pip_gets_it(checkout):
    own_environment(checkout)
    (checkout.aside / "stubs/pip.py").unlink()
    (checkout.aside / "stubs/ensurepip.py").write_text(STUB_TOOL.format(name="ensurepip"))
    checkout.start("scripts/verify")
    assert checkout.calls("ensurepip") == [[]]


def test_what_is_no_environment_is_not_touched(checkout):
    checkout.venv.mkdir()
    (checkout.venv / "thesis.tex").touch()
    assert "move it away" in refusal(checkout.start("scripts/verify"))
    assert os.listdir(checkout.venv) == ["thesis.tex"]
    shutil.rmtree(checkout.venv)
    checkout.venv.write_text("a file")
    assert "move it away" in refusal(checkout.start("scripts/verify"))


# Failures and interrupts.


def test_failed_install_leaves_nothing(checkout):
    assert "network" in refusal(checkout.start("scripts/verify", pip=1))
    assert not checkout.venv.exists()


def test_failed_upgrade_leaves_the_good_environment(checkout):
    checkout.start("scripts/verify")
    stamp = checkout.stamp
    (checkout.venv / "kept").touch()
    refusal(checkout.start("scripts/test", pip=1))
    assert checkout.stamp == stamp
    assert (checkout.venv / "kept").exists()
    assert checkout.start("scripts/verify", pip=1).returncode == 0


def test_no_network_is_one_sentence_after_pips_own(checkout):
    """With the real venv and pip, and a package index where nobody listens."""
    for name in ("pip", "venv"):
        (checkout.aside / f"stubs/{name}.py").unlink()
    closed = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    checkout.env.update(closed)
    done = checkout.start("scripts/verify")
    assert "network" in refusal(done)
    assert "ropegrad: ERROR: No matching distribution found for hatchling" in done.stderr
    assert len(done.stderr.splitlines()) == 3
    assert not checkout.venv.exists()


@pytest.mark.parametrize("module", ["ensurepip", "venv"])
def test_missing_venv_or_ensurepip_names_the_package_to_install(checkout, module):
    done = start_patched(checkout, "scripts/verify", f"sys.modules[{module!r}] = None")
    assert f"apt install python3.{sys.version_info.minor}-venv" in refusal(done)
    assert len(done.stderr.splitlines()) == 1
    assert not checkout.venv.exists()


def test_failing_venv_is_refused(checkout):
    refusal(checkout.start("scripts/verify", venv=1))
    assert not checkout.venv.exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_old_python_is_refused(checkout, script):
    done = start_patched(checkout, script, "sys.version_info = (3, 9, 18)")
    assert "3.9" in refusal(done)
    assert len(done.stderr.splitlines()) == 1
    assert not checkout.venv.exists()


def start_patched(checkout, script, patch):
    path = str(checkout.root / script)
    code = f"import runpy, sys; {patch}; sys.argv = [{path!r}]; runpy.run_path({path!r}, run_name='__main__')"
    return finish(checkout.launch([sys.executable, "-c", code]))


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse_on_old_python_and_need_only_the_standard_library(script):
    tree = ast.parse((ROOT / script).read_text(), feature_version=(3, 6))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "bootstrap"}
    assert "__future__" not in names  # annotations came with Python 3.7


def test_oldest_python_is_the_one_of_pyproject():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f"OLDEST = ({required.removeprefix('>=').replace('.', ', ')})" in (ROOT / SCRIPTS[0]).read_text()


@pytest.fixture
def not_ignoring():
    """Signals that end what they reach: under nohup and in background jobs some are ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("not_ignoring")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_interrupted_install_leaves_nothing(checkout, name):
    started = checkout.launch_hanging("scripts/verify")
    pip = checkout.log()[-1][-1]
    started.send_signal(signal.Signals[name])
    done = finish(started)
    assert done.returncode == 128 + signal.Signals[name]
    assert "Traceback" not in done.stderr
    assert not checkout.venv.exists()
    assert not alive(pip)


@pytest.mark.usefixtures("not_ignoring")
def test_interrupted_extension_leaves_the_good_environment(checkout):
    checkout.start("scripts/verify")
    stamp = checkout.stamp
    started = checkout.launch_hanging("scripts/test")
    started.send_signal(signal.SIGINT)
    assert finish(started).returncode == 130
    assert checkout.stamp == stamp


# The gate.


def test_gate_runs_ruff_mypy_pytest(checkout):
    done = checkout.start("scripts/test", "--long", "-k", "a or b")
    assert done.returncode == 0
    after = [(name, *rest) for name, *rest in checkout.log() if name in ("ruff", "mypy", "pytest")]
    assert [(name, arguments) for name, arguments, *_ in after] == [
        ("ruff", ["check"]),
        ("mypy", []),
        ("pytest", ["-n", "2", "--long", "-k", "a or b"]),
    ]
    assert {folder for _, _, folder, _ in after} == {str(checkout.root)}


@pytest.mark.parametrize("tool", ["ruff", "mypy", "pytest"])
def test_gate_ends_at_the_first_failure_with_its_status(checkout, tool):
    assert checkout.start("scripts/test", **{tool: 5}).returncode == 5
    assert checkout.log()[-1][0] == tool + " ended"


@pytest.mark.parametrize("chosen", [["-n", "4"], ["-n0"], ["-p", "no:xdist"], ["--numprocesses=3"]])
def test_gate_leaves_the_number_of_workers_to_the_user(checkout, chosen):
    checkout.start("scripts/test", *chosen)
    assert checkout.calls("pytest") == [chosen]


def test_gate_explains_itself_without_installing(checkout):
    done = checkout.start("scripts/test", "--help")
    assert "--require-extras" in done.stdout
    assert not checkout.venv.exists()


@pytest.mark.parametrize("missing", [[], ["g++"], ["chromium"]])
def test_ci_goes_from_nothing_to_the_gate(checkout, missing):
    tools = checkout.aside / "bin"
    tools.mkdir()
    for name in {"g++", "chromium", "apt-get", "sudo"} - set(missing):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{checkout.aside}/system"\n')
    (tools / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for name in ("bash", "dirname", "readlink", "env", "id"):
        (tools / name).symlink_to(shutil.which(name))
    for tool in tools.iterdir():
        tool.chmod(0o755)
    checkout.env["PATH"] = str(tools)
    assert finish(checkout.launch(["bash", str(checkout.root / ".ci/run")], pytest=6)).returncode == 6
    assert checkout.installed() == [".", "torch==2.13.0", ".[compile,cpu,dask,interop,test]"]
    assert checkout.calls("pytest") == [["-n", "2", "--require-extras"]]
    system = checkout.aside / "system"
    asked = system.read_text() if system.exists() else ""
    assert [name for name in ("g++", "chromium") if name in asked] == missing


# The options of conftest.py.

SAMPLE = """
import pytest
from conftest import need
from hypothesis import given, strategies

@pytest.mark.long
def test_long():
    pass

def test_extra():
    need("no_such_module", "interop")

def test_gpu_extra():
    need("no_such_module", "cuda12")

@given(strategies.integers())
def test_examples(number):
    print("drew", number)
"""


def sample_run(folder, *options):
    shutil.copy(ROOT / "tests/conftest.py", folder)
    (folder / "test_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "-ra", "-s", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def drawn(out):
    return re.findall(r"drew (-?\d+)", out)


def test_a_missing_extra_is_skipped_by_name_and_long_tests_are_deselected(tmp_path):
    out = sample_run(tmp_path)
    assert "1 passed, 2 skipped, 1 deselected" in out
    assert "needs extra 'interop': no_such_module is not installed" in out
    assert 0 < len(drawn(out)) <= 200
    assert drawn(out) == drawn(sample_run(tmp_path)), "the seed is fixed"


def test_require_extras_fails_and_long_runs_everything_with_a_seed_to_repeat(tmp_path):
    out = sample_run(tmp_path, "--require-extras", "--long")
    assert "1 failed, 2 passed, 1 skipped" in out
    assert len(drawn(out)) > 200
    assert drawn(out) != drawn(sample_run(tmp_path, "--long"))
    seed = out.partition("--hypothesis-seed=")[2].split()[0]
    assert drawn(out) == drawn(sample_run(tmp_path, "--long", f"--hypothesis-seed={seed}"))
