"""What the makers say their devices can do: the ceilings of any time, before anything is measured.

To add a device: give the name that `cudaGetDeviceProperties` reports (or the longest part of it that only
this device has), rates for *dense* operands (NVIDIA prints tensor rates with 2:4 sparsity: halve them), the
L2 as `cudaDevAttrL2CacheSize` reports it or as the source prints it, and the document each comes from.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Datasheet:
    """One device. bandwidth in bytes/s; rates in FLOP/s, dense; l2 in bytes, None if no document says."""

    name: str
    bandwidth: float
    fp32: float
    tf32: float
    fp16: float
    l2: int | None
    source: str

    def rate(self, precision: str) -> float:
        """FLOP/s of matrix products: fp32 without tensor cores, tf32, or fp16 with float32 sums.

        A promise about accuracy may be kept by any instruction: nothing is faster than fp16.
        """
        return {"fp32": self.fp32, "tf32": self.tf32}.get(precision, self.fp16)


_T, _MB = 1e12, 1 << 20

DATASHEETS = (
    Datasheet(
        "NVIDIA B200", 8.0 * _T, 80 * _T, 1100 * _T, 2250 * _T, None,
        "NVIDIA Blackwell Architecture Technical Brief, HGX B200 column",
    ),
    Datasheet(
        "NVIDIA H200", 4.8 * _T, 67 * _T, 494.5 * _T, 989.5 * _T, 60 * _MB,
        "NVIDIA H200 Tensor Core GPU datasheet, SXM, https://www.nvidia.com/en-us/data-center/h200/ "
        "(989 and 1,979 TFLOPS with sparsity); L2: CUDA device query",
    ),
    Datasheet(
        "NVIDIA H100 80GB HBM3", 3.35 * _T, 67 * _T, 494.5 * _T, 989.5 * _T, 50 * _MB,
        "NVIDIA H100 Tensor Core GPU datasheet, SXM, https://www.nvidia.com/en-us/data-center/h100/ "
        "(989 and 1,979 TFLOPS with sparsity); L2: NVIDIA H100 Tensor Core GPU Architecture whitepaper",
    ),
    Datasheet(
        "NVIDIA A100-SXM4-80GB", 2.039 * _T, 19.5 * _T, 156 * _T, 312 * _T, 40 * _MB,
        "NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM, https://www.nvidia.com/en-us/data-center/a100/; "
        "L2: NVIDIA A100 Tensor Core GPU Architecture whitepaper",
    ),
    Datasheet(
        "NVIDIA L40S", 0.864 * _T, 91.6 * _T, 183 * _T, 362.05 * _T, None,
        "NVIDIA L40S datasheet, https://www.nvidia.com/en-us/data-center/l40s/ (366 and 733 TFLOPS with "
        "sparsity)",
    ),
)  # fmt: skip


def find(device: str) -> Datasheet | None:
    """The entry whose name the device's name begins with; None if there is none."""
    found = [sheet for sheet in DATASHEETS if f"{device} ".startswith(f"{sheet.name} ")]
    return max(found, key=lambda sheet: len(sheet.name), default=None)
