"""A CPU's roofline and a table of its times, from the records that `ropegrad bench --json FILE` wrote.

    roofline.py [FILE [FIGURE]]

The slope is the copy of the same bytes, the roof BLAS's matrix products, both on the same threads in the same
run. Of each contender with several formulas the fastest is shown.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

from ropegrad import records
from ropegrad.records import Record

RESULTS = Path(__file__).resolve().parent / "results"
MARKS = {
    "numba_cpu": "o",
    "numpy_tiled": "s",
    "torch.compile": "^",
    "torch": "v",
    "jax.jit": "D",
    "numpy": "x",
}


def fastest(found: list[Record]) -> dict[str, dict[str, Record]]:
    """By case, then by backend, the record with the shortest median; the copy under its own name."""
    cases: dict[str, dict[str, Record]] = {}
    for record in found:
        if record.op == "gemm" or record.median_us is None:
            continue
        name = "copy" if record.op == "copy" else record.backend
        case = cases.setdefault(record.case, {})
        if name not in case or record.median_us < (case[name].median_us or 0.0):
            case[name] = record
    return cases


def milliseconds(record: Record) -> float:
    """Median."""
    return (record.median_us or float("nan")) / 1e3


def rate(record: Record) -> float:
    """GFLOP/s."""
    return record.flops / milliseconds(record) / 1e6


def print_table(found: list[Record], cases: dict[str, dict[str, Record]]) -> None:
    """Markdown: times in ms, and how many times longer than ours."""
    first = found[0]
    print(f"{first.device}, {first.options['threads']} threads, {len(first.samples_us)} samples in turns, "
          f"commit {first.commit}\n")  # fmt: skip
    backends = [name for name in ("copy", *MARKS) if any(name in case for case in cases.values())]
    print("| ms | " + " | ".join(backends) + " |\n|---|" + "--:|" * len(backends))
    for name, case in cases.items():
        ours = min((milliseconds(case[b]) for b in ("numba_cpu", "numpy_tiled") if b in case), default=0.0)
        cells = [_cell(case.get(backend), ours) for backend in backends]
        print(f"| {name} | " + " | ".join(cells) + " |")


def _cell(record: Record | None, ours: float) -> str:
    if record is None:
        return "-"
    took = milliseconds(record)
    return f"{took:.1f}" if not ours or took == ours else f"{took:.1f} ({took / ours:.2f} ×)"


def draw(found: list[Record], cases: dict[str, dict[str, Record]], path: Path) -> None:
    """One panel: FLOPs a byte against GFLOP/s, both logarithmic."""
    figure, axes = plt.subplots(figsize=(7.5, 4.6), constrained_layout=True)
    copies = [case["copy"] for case in cases.values()]
    bandwidth = max(record.bytes / milliseconds(record) / 1e6 for record in copies)  # GB/s
    roof = max(rate(record) for record in found if record.op == "gemm")
    ridge = roof / bandwidth
    axes.loglog([0.3, ridge, 1e3], [0.3 * bandwidth, roof, roof], color="black", lw=1)
    axes.text(0.6 * ridge, 0.65 * roof, f"copy, {bandwidth:.1f} GB/s", fontsize=8, ha="right")
    axes.text(1.1 * ridge, 1.1 * roof, f"matrix products, {roof:.0f} GFLOP/s", fontsize=8)
    for backend, mark in MARKS.items():
        points = [case[backend] for case in cases.values() if backend in case]
        intensity = [record.flops / record.bytes for record in points]
        axes.plot(intensity, list(map(rate, points)), mark, label=backend, fillstyle="none", zorder=3)
    for label, place in sorted({_label(r) for case in cases.values() for r in case.values() if r.flops}):
        axes.axvline(place, color="0.85", lw=0.8, zorder=0)
        axes.text(place, 1, label, fontsize=8, ha="center", va="bottom",
                  transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set(xlabel="FLOP / byte (each input read once, each output written once)", ylabel="GFLOP/s",
             xlim=(0.3, 1e3))  # fmt: skip
    axes.set_title(f"{found[0].device}, {found[0].options['threads']} threads", fontsize=10, pad=28)
    axes.legend(fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _label(record: Record) -> tuple[str, float]:
    geometry = record.spec.get("rope", record.spec)
    return f"{record.op}\n{geometry['dtype']}", round(record.flops / record.bytes, 3)


def main() -> None:
    """Print the table and write the figure beside the records."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "cpu.jsonl"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".svg")
    found = records.read(source)
    cases = fastest(found)
    print_table(found, cases)
    draw(found, cases, target)


if __name__ == "__main__":
    main()
