"""Options, Hypothesis profiles, and the one way to skip what is not installed here."""

import importlib
import secrets
import warnings
from types import ModuleType
from typing import NoReturn

import pytest
from hypothesis import settings

settings.register_profile("gate", derandomize=True, max_examples=100, deadline=None, print_blob=True)
settings.register_profile("long", derandomize=False, max_examples=2000, deadline=None, print_blob=True)

# --require-extras leaves these alone: what they install is of use only with an NVIDIA GPU.
GPU_EXTRAS = {"cuda12", "cuda13"}

_config: pytest.Config  # for need() and skip(), which also run while modules are collected


def need(module: str, extra: str) -> ModuleType:
    """Import a module that an extra brings, or skip: `torch = need("torch", "interop")`.

    For use in a test, a fixture or the head of a test module, never in conftest.py. A module that is
    installed but fails to import is an error, not a skip.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what others deprecate in their imports is not ours to fail on
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
    skip(f"needs extra {extra!r}: {module} is not installed", required=extra not in GPU_EXTRAS)


def skip(reason: str, *, required: bool = True) -> NoReturn:
    """Skip the test or module with a reason; with --require-extras fail instead, if it is required."""
    if required and _config.getoption("require_extras"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(params=("numpy_tiled", "numba_cpu", "portable"), scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that runs NumPy arrays."""
    if request.param == "numba_cpu":
        need("numba", "cpu")
    return request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run tests marked long, with more examples")
    parser.addoption("--require-extras", action="store_true", help="fail where an extra is missing, not skip")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    global _config
    _config = config
    config.addinivalue_line("markers", "long: takes minutes; run only with --long")
    settings.load_profile("long" if config.getoption("long") else "gate")
    if config.getoption("long") and config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = str(secrets.randbits(32))


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.getoption("long"):
        return None
    seed = config.getoption("hypothesis_seed")
    return f"profile long; the same examples again: --long --hypothesis-seed={seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if item not in long]
    config.hook.pytest_deselected(items=long)
