"""Matrix products at each precision by cuBLAS: the rates that the QKV projections can hope for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ropegrad.backends.cublas import F32, PEDANTIC_32F, TF32_32F, multiply
from ropegrad.bench.timing import Call

# cuBLAS's mode; operands' dtype; unit roundoff of an operand (TF32 may truncate to 10 bits) and of a
# sum (tensor cores truncate: Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores")
PRECISIONS = {
    "fp32": (PEDANTIC_32F, "float32", 0.0, 2.0**-24),
    "tf32": (TF32_32F, "float32", 2.0**-10, 2.0**-22),
    "fp16": (F32, "float16", 0.0, 2.0**-22),  # float32 sums and result
}
SHAPES = (
    (8192, 3072, 1536),
    (8192, 8192, 8192),
)  # rows, inner, columns: qkv's grad_hidden at B·S = 8192; a large one
ROWS = 3  # of a product, compared with float64


@dataclass(frozen=True)
class Product:
    """C[m, n] = A[m, k]·B[k, n], row-major; result float32."""

    m: int
    k: int
    n: int
    precision: str

    @property
    def flops(self) -> int:
        """A multiplication and an addition each."""
        return 2 * self.m * self.k * self.n

    @property
    def read(self) -> int:
        """Bytes of A and B."""
        return (self.m * self.k + self.k * self.n) * (2 if self.precision == "fp16" else 4)

    @property
    def written(self) -> int:
        """Bytes of C."""
        return self.m * self.n * 4

    def arrays(self, count: int) -> list[list[Any]]:
        """Sets of A, B, C: random normal, and NaN in C."""
        import cupy

        random = cupy.random.default_rng(2026)
        dtype = PRECISIONS[self.precision][1]
        return [
            [
                random.standard_normal((self.m, self.k), dtype=cupy.float32).astype(dtype),
                random.standard_normal((self.k, self.n), dtype=cupy.float32).astype(dtype),
                cupy.full((self.m, self.n), cupy.nan, cupy.float32),
            ]
            for _ in range(count)
        ]

    def calls(self, sets: Sequence[Sequence[Any]]) -> list[Call]:
        """The product on each set."""
        mode = PRECISIONS[self.precision][0]
        return [partial(multiply, a, b, c, mode) for a, b, c in sets]

    def check(self, a: Any, b: Any, c: Any) -> tuple[float, float]:
        """Worst error/bound and effective bits over some rows, against float64.

        |error| ≤ (2u + u² + k·v)·Σ|a·b|, u and v the roundoffs of an operand and of a sum.
        """
        import cupy

        chosen = [0, self.m // 2, self.m - 1][:ROWS]
        rows, b = a[chosen].astype(cupy.float64), b.astype(cupy.float64)
        error = cupy.abs(c[chosen].astype(cupy.float64) - rows @ b)
        _, _, u, v = PRECISIONS[self.precision]
        bound = (2 * u + u * u + self.k * v) * (cupy.abs(rows) @ cupy.abs(b))
        ratio = float(cupy.where(cupy.isnan(error), cupy.inf, error / bound).max())
        noise = float(cupy.sqrt(cupy.mean(error**2 / ((rows**2) @ (b**2)))))
        return ratio, -math.log2(noise) if noise > 0 else math.inf
