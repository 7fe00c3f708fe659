"""The device a figure belongs to: name, driver, L2, clocks. Everything is read, nothing is set."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

import ropegrad
from ropegrad.bench.datasheet import Datasheet, find


@dataclass(frozen=True)
class Device:
    """A GPU, or a CPU, which has no bus and no L2 to flush.

    l2 in bytes; driver: NVML's version, or the CUDA version that it supports; of a CPU the system's.
    """

    name: str
    driver: str
    l2: int
    multiprocessors: int
    pci_bus: str

    @property
    def datasheet(self) -> Datasheet | None:
        """What its maker says it can do; None for a device that the table lacks."""
        return find(self.name)

    def clocks(self) -> dict[str, int] | None:
        """MHz of "sm" and "memory" at this moment; None without NVML (package nvidia-ml-py), or of a CPU."""
        if not self.pci_bus:
            return None
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByPciBusId(self.pci_bus.encode())
            kinds = {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}
            return {name: int(nvml.nvmlDeviceGetClockInfo(handle, kind)) for name, kind in kinds.items()}
        except Exception:  # absent, too old, or refused here: then the record says null
            return None


def current() -> Device:
    """The device that CuPy uses now."""
    import cupy

    runtime, here = cupy.cuda.runtime, cupy.cuda.Device()
    properties = runtime.getDeviceProperties(here.id)
    return Device(
        name=properties["name"].decode(),
        driver=_driver(runtime),
        l2=int(runtime.deviceGetAttribute(runtime.cudaDevAttrL2CacheSize, here.id)),
        multiprocessors=int(properties["multiProcessorCount"]),
        pci_bus=str(here.pci_bus_id),
    )


def versions() -> dict[str, str]:
    """Of what decides the machine code and the reading of times."""
    import cupy

    found = {
        "ropegrad": ropegrad.__version__,
        "python": platform.python_version(),
        "cupy": str(cupy.__version__),
    }
    for package in ("numpy", "cupti-python"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["cuda-runtime"] = str(cupy.cuda.runtime.runtimeGetVersion())
    found["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    return found


def _driver(runtime: Any) -> str:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    except Exception:
        return f"CUDA {runtime.driverGetVersion()}"
