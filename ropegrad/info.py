"""What is installed here and what can run: the facts that a report about a fault should carry."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ropegrad.tiles import cores

PACKAGES = {
    "numpy": "numpy", "array-api-compat": "array_api_compat", "ml-dtypes": "ml_dtypes",
    "hypothesis": "hypothesis", "numba": "numba", "torch": "torch", "jax": "jax", "dask": "dask",
    "cupy-cuda12x": "cupy", "cupy-cuda13x": "cupy",
}  # fmt: skip


_NAMES = {"numpy": "NumPy", "cupy": "CuPy"}


def info() -> dict[str, Any]:
    """Versions, devices, BLAS and backends, as plain values."""
    return {
        "ropegrad": _version("ropegrad"),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": cores(),
        "blas": _blas(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": _cuda(),
        "kernel cache": _kernel_cache(),
        "devices": _gpus(),
        "backends": _backends(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else platform.processor() or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _blas() -> str:
    config: dict[str, Any] = np.show_config(mode="dicts")  # type: ignore[assignment]
    blas = config.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def _cuda() -> str:
    """The versions that must fit each other: the driver's, and those of the libraries that CuPy loads."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    installed = [name for name, module in PACKAGES.items() if module == "cupy" and _version(name)]
    several = "; two CuPys share one folder: uninstall both, then install one" if len(installed) > 1 else ""
    try:
        cuda = importlib.import_module("cupy").cuda
    except Exception as error:
        return f"CuPy cannot be imported: {type(error).__name__}: {error}{several}"
    readers = {
        "driver": cuda.runtime.driverGetVersion, "runtime": cuda.runtime.runtimeGetVersion,
        "NVRTC": cuda.nvrtc.getVersion,
    }  # fmt: skip
    return ", ".join(f"{part} {_cuda_version(read)}" for part, read in readers.items()) + several


def _cuda_version(read: Callable[[], int | tuple[int, int]]) -> str:
    try:
        found = read()
    except Exception as error:
        return f"missing ({type(error).__name__}: {error})"
    major, minor = found if isinstance(found, tuple) else (found // 1000, found % 1000 // 10)
    return f"{major}.{minor}" if major else "missing"


def _kernel_cache() -> str:
    """The folder in which CuPy keeps compiled kernels: without one every process compiles anew, or fails."""
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    can = there.is_dir() and os.access(there, os.W_OK)
    return str(folder) if can else f"{folder} cannot be written: set CUPY_CACHE_DIR"


def _gpus() -> list[str]:
    """NVIDIA devices that CuPy sees, or one sentence why there is none to see."""
    if importlib.util.find_spec("cupy") is None:
        return ["no GPU: CuPy is not installed (extra cuda12 or cuda13)"]
    try:
        import cupy

        runtime = cupy.cuda.runtime
        return [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]
    except Exception as error:  # a broken driver or wheel must not break the report about it
        return [f"no GPU: {type(error).__name__}: {error}"]


def _backends() -> dict[str, str]:
    """Each backend, and what it can run here or why it cannot."""
    from ropegrad.backends import BACKENDS
    from ropegrad.backends.cupy_plain import no_gpu
    from ropegrad.spec import RopeSpec

    spec = RopeSpec(batch=1, heads=1, kv_heads=1, seq=1, head_dim=2, rotary_dim=2, table_batch=1)
    report = {}
    for backend in BACKENDS:
        namespace = "cupy" if backend.name.startswith("cupy") else "numpy"
        reason = backend.why_not(replace(spec, namespace=namespace))
        if reason is None and namespace == "cupy":
            reason = no_gpu()
        report[backend.name] = f"can run {_NAMES[namespace]} arrays" if reason is None else reason
    frameworks = {"torch": "torch", "jax": "jax", "dask": "dask", "array_api_strict": "array_api_strict"}
    found = [name for name, module in frameworks.items() if importlib.util.find_spec(module)]
    missing = [name for name in ("torch", "jax", "dask") if name not in found]
    report["portable"] += "".join(f", {name} too" for name in found)
    if missing:
        report["portable"] += f"; not {', '.join(missing)}: not installed (extra interop or dask)"
    return report
