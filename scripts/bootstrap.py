"""Make .venv beside pyproject.toml once, and run commands in it.

`python3 scripts/bootstrap.py [EXTRA ...]` only installs. Standard library only, and no syntax newer than
Python 3.6, so that an old interpreter reads far enough to say that it is too old.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

OLDEST = (3, 11)  # as requires-python in pyproject.toml
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "ropegrad.json"  # what is installed, and whether the install came to its end


def say(line: str) -> None:
    """Tell the user one line, on stderr: stdout is the inner command's."""
    print("ropegrad: " + line, file=sys.stderr, flush=True)


def refuse(sentence: str) -> NoReturn:
    """End with a sentence that names the remedy."""
    say(sentence)
    raise SystemExit(2)


if sys.version_info < OLDEST:
    oldest, this = [".".join(map(str, version[:2])) for version in (OLDEST, sys.version_info)]
    refuse(f"this is Python {this} and {oldest} or newer is needed; start again with one, say python{oldest}")


def ready(extras: Iterable[str] = ()) -> None:
    """Return once .venv holds ropegrad and the extras; otherwise exit with a sentence and status 2."""
    for number in _signals():
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and background jobs ignore some
            signal.signal(number, _interrupted)
    try:
        _prepare(set(extras))
    except OSError as error:
        refuse(f"cannot prepare {VENV} ({error}); make its folder writable, or copy the checkout elsewhere")


def call(*arguments: str) -> int:
    """Exit status of .venv's python with these arguments, run in the checkout."""
    status = subprocess.call([str(PYTHON), *arguments], cwd=ROOT)
    return status if status >= 0 else 128 - status  # ended by a signal: the shell's number for it


def become(*arguments: str) -> NoReturn:
    """Go on as .venv's python with these arguments: exit status and signals are then its own."""
    command = [str(PYTHON), *arguments]
    if os.name == "posix":
        os.execv(command[0], command)
    raise SystemExit(subprocess.call(command))


def _signals() -> list[signal.Signals]:
    return [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _prepare(extras: set[str]) -> None:
    if _is_ready(_read_stamp(), extras):
        return
    with _lock() as lock:
        stamp = _read_stamp()  # again: the start that held the lock may have installed it all
        if _is_ready(stamp, extras):
            return
        extras |= set(stamp.get("extras", []))  # never smaller than it was
        reason = _reason_to_make(stamp)
        if reason:
            _require_venv()
            say(reason + ": installing ropegrad into .venv (once; about a minute)")
            _make(extras, lock)
        else:
            say("bringing .venv up to date" + (" with extras " + ", ".join(sorted(extras)) if extras else ""))
            _extend(stamp, extras, lock)


def _is_ready(stamp: dict[str, Any], extras: set[str]) -> bool:
    installed = stamp.get("extras", [])
    now = _stamp(complete=True, ours=stamp.get("ours", False), extras=installed)
    return stamp == now and extras <= set(installed)


def _reason_to_make(stamp: dict[str, Any]) -> str | None:
    """Why .venv must be made from nothing, or None if installing into it is enough."""
    if not os.path.lexists(VENV):
        return "no .venv yet"
    python = _python()
    if python is None and VENV.is_dir() and not os.listdir(VENV):
        return ".venv is empty"
    if python is None and not stamp and not (VENV / "pyvenv.cfg").exists():
        refuse(f"{VENV} is not a Python environment; move it away and start again")
    if stamp.get("ours") and not stamp.get("complete"):
        return ".venv is half-made"
    if python is None or python < list(OLDEST):
        return "the Python of .venv is gone, broken or too old"
    if not stamp.get("ours"):
        return None  # somebody's own environment: install into it, delete nothing
    if stamp.get("checkout") != str(ROOT):
        return f".venv was made for {stamp.get('checkout')}"
    if stamp.get("python") != python:
        return "the Python of .venv has changed"
    return None


def _require_venv() -> None:
    try:
        import venv  # noqa: F401
        from ensurepip import bootstrap  # noqa: F401  # a name of it: the folder that it left would import too
    except ImportError:
        refuse(
            "this Python cannot make environments, its venv or ensurepip module is missing; install that (on "
            f"Debian and Ubuntu: apt install python3.{sys.version_info.minor}-venv), then start again"
        )


def _make(extras: set[str], lock: list[int]) -> None:
    try:
        _clear()
        VENV.mkdir()
        _write_stamp(_stamp(complete=False, ours=True, extras=extras))
        status, output = _run([sys.executable, "-m", "venv", str(VENV)], lock)
        if status:
            say(_last_error(output))
            refuse("python3 -m venv failed; make that command work (or try another Python), then start again")
        _install(extras, lock)
        _write_stamp(_stamp(complete=True, ours=True, extras=extras))
    except BaseException:
        _ignore_signals()
        _clear()
        raise


def _extend(stamp: dict[str, Any], extras: set[str], lock: list[int]) -> None:
    ours = stamp.get("ours", False)
    _write_stamp(_stamp(complete=False, ours=ours, extras=extras))
    try:
        _install(extras, lock)
    except BaseException:
        _ignore_signals()
        if stamp:
            _write_stamp(stamp)
        else:
            STAMP.unlink()
        raise
    _write_stamp(_stamp(complete=True, ours=ours, extras=extras))


def _install(extras: set[str], lock: list[int]) -> None:
    if _run([str(PYTHON), "-c", "import pip"], lock)[0]:  # some tools make environments without pip
        _run([str(PYTHON), "-m", "ensurepip"], lock)
    target = "." + ("[" + ",".join(sorted(extras)) + "]" if extras else "")
    options = ["--quiet", "--no-input", "--disable-pip-version-check"]
    status, output = _run([str(PYTHON), "-m", "pip", "install", *options, "-e", target], lock)
    if status:
        say(_last_error(output))
        refuse("pip could not install ropegrad; check the network and pip's package index, then start again")


def _last_error(output: str) -> str:
    """The line of pip's output that says most: the last ERROR or exception, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    return ([line for line in lines if re.match(r"(ERROR|\w+Error): ", line)] or lines)[-1]


def _run(command: Sequence[str], lock: list[int]) -> tuple[int, str]:
    """Status and output of a child in the checkout.

    The child has a process group of its own, so that we can end it with all its helpers. It also holds the
    lock: if we are killed outright, no later start touches .venv while the child still writes to it.
    """
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=lock,
    )
    try:
        output, _ = child.communicate()
    except BaseException:
        _ignore_signals()
        _stop(child)
        raise
    return child.returncode, output


def _stop(child: subprocess.Popen[str]) -> None:
    """End a child and its helpers; asked first, since pip then puts back what it was replacing."""
    if os.name != "posix":
        child.kill()
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _ignore_signals() -> None:
    """A second Ctrl-C must not interrupt the clean-up after the first."""
    for number in _signals():
        signal.signal(number, signal.SIG_IGN)


def _clear() -> None:
    """Delete .venv, its stamp last: killed in between, it is still known as half-made."""
    if VENV.is_symlink():
        VENV.unlink()
    if not VENV.exists():
        return
    _write_stamp(_stamp(complete=False, ours=True, extras=_read_stamp().get("extras", [])))
    for entry in VENV.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != STAMP:
            entry.unlink()
    shutil.rmtree(VENV)


def _stamp(complete: bool, ours: bool, extras: Iterable[str]) -> dict[str, Any]:
    return {
        "complete": complete,
        "ours": ours,  # made here, so ours to delete
        "checkout": str(ROOT),
        "project": _project(),
        "python": _python(),
        "extras": sorted(extras),
    }


def _project() -> str:
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()


def _read_stamp() -> dict[str, Any]:
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(stamp: dict[str, Any]) -> None:
    fresh = STAMP.with_suffix(".new")
    fresh.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    fresh.replace(STAMP)


def _python() -> list[int] | None:
    """Version (major, minor) of .venv's python, None if it does not run or does not belong to .venv."""
    probe = "import sys; print(*sys.version_info[:2]); print(sys.prefix)"
    try:
        answer = subprocess.run([str(PYTHON), "-I", "-c", probe], capture_output=True, text=True).stdout
    except OSError:
        return None
    version, _, prefix = answer.partition("\n")
    if not prefix or Path(prefix.rstrip("\n")).resolve() != VENV.resolve():
        return None
    return [int(number) for number in version.split()]


@contextlib.contextmanager
def _lock() -> Iterator[list[int]]:
    """Keep a second start waiting; yields what a child must inherit to hold the lock too.

    It is a lock on the checkout's folder, which needs no file of its own.
    """
    if os.name != "posix":  # no flock there: two first starts at once are the user's to avoid
        yield []
        return
    import fcntl

    folder = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another start that is installing into .venv")
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks, such as some network shares
        yield [folder]
    finally:
        os.close(folder)


def _main(extras: list[str]) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = project.get("optional-dependencies", {})
    for extra in extras:
        if extra not in known:
            refuse(f"there is no extra {extra!r}; choose from {', '.join(known)}")
    ready(extras)


if __name__ == "__main__":
    _main(sys.argv[1:])
