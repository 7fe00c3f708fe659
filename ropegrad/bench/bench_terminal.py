"""What `ropegrad bench` shows: for each case the contenders' times, as multiples of the ceiling and of ours.

Who promises the same stands in one table. The last column is the worst error of the check before, as a
fraction of its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.bench import on_cpu, on_gpu
from ropegrad.bench.asked import Asked, settle
from ropegrad.bench.facts import OPS, PRODUCTS, limit_us
from ropegrad.bench.ledger import Ledger, is_judged
from ropegrad.bench.place import Place
from ropegrad.bench.suite import time_case
from ropegrad.bench.targets import Target
from ropegrad.bench.terminal import columns
from ropegrad.bench.threads import limited, unlimited
from ropegrad.bench.workloads import Problem, problems
from ropegrad.errors import SpecError
from ropegrad.records import Record
from ropegrad.tiles import cores
from ropegrad.verify.target import NoTarget

WRONG, COULD_NOT, INTERRUPTED = 1, 2, 130
SAMPLES = {"cpu": 15, "gpu": 30}


def bench(console: Console, asked: Asked) -> int:
    """Measure and show; exit status 0, 1 if ours or a target is wrong, 2 if a wish cannot be honoured."""
    try:
        asked = settle(asked)
        cases = problems(
            asked.cases_of, asked.contract, asked.domain, case=asked.case, only=asked.op,
            quick=asked.choice.quick,
        )  # fmt: skip
        ledger = Ledger(asked.json)
        with _place(asked) as place:
            targets = [Target(name, asked.contract) for name in asked.targets]
            show_run(console, place)
            if isinstance(place, on_cpu.Cpu):
                show_products(console, place, ledger)
            return run(console, place, cases, targets, asked, ledger)
    except (SpecError, NoTarget, OSError, ValueError) as error:
        console.print(f"ropegrad bench: {error}", style="bold red", highlight=False, markup=False)
        return COULD_NOT


@contextmanager
def _place(asked: Asked) -> Iterator[Place]:
    """Raises SpecError where there is none."""
    samples = asked.samples or (5 if asked.choice.quick else SAMPLES["gpu" if asked.gpu else "cpu"])
    threads = cores() if asked.threads is None else asked.threads
    reason = no_gpu() if asked.gpu else unlimited(threads)
    if reason is not None:
        raise SpecError(f"there is nothing to time on: {reason}" if asked.gpu else reason)
    with nullcontext() if asked.gpu else limited(threads):
        if asked.gpu:
            yield on_gpu.start(samples, asked.commit, asked.command, cupti="span" in asked.protocols)
        else:
            yield on_cpu.start(threads, samples, asked.commit, asked.command)


def run(
    console: Console, place: Place, cases: Sequence[Problem], targets: Sequence[Target], asked: Asked,
    ledger: Ledger,
) -> int:  # fmt: skip
    """Every case that the ledger lacks; what is done stays when it is interrupted."""
    protocols, done, found = asked.protocols or place.protocols, 0, list[Record]()
    try:
        with progress_of(console, len(cases)) as progress:
            for number, problem in enumerate(cases):
                everybody = [target.contender(problem.spec) for target in targets]
                everybody = [*place.contenders(problem.spec, asked.choice), *everybody]
                label = f"{problem.suite} {problem.name}"
                if ledger.has(place, problem, everybody, protocols):
                    here, done = ledger.of(problem), done + 1
                else:
                    tell: Callable[[str], None] = lambda what, at=number, who=label: progress(  # type: ignore[misc]  # noqa: E731
                        at, f"{who}: {what}"
                    )
                    here = time_case(place, problem, everybody, protocols, tell)
                    ledger.add(here)
                found += here
                show_case(console, label, here)
    except KeyboardInterrupt:
        kept = f"; {ledger.path} has what was measured, the same command goes on" if ledger.path else ""
        console.print(f"interrupted{kept}", style="bold yellow", highlight=False, markup=False)
        return INTERRUPTED
    if done:
        console.print(f"\n{done} of {len(cases)} cases were in {ledger.path} already", highlight=False)
    return verdict(console, found)


@contextmanager
def progress_of(console: Console, steps: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal; a line a case elsewhere."""
    words = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*words, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps)

        def progress(number: int, what: str) -> None:
            bar.update(task, completed=number, description=escape(what))

        yield progress


def verdict(console: Console, found: Sequence[Record]) -> int:
    """The last line and the exit status."""
    judged = [record for record in found if is_judged(record)]
    wrong = [record for record in judged if record.invalid is None and not record.passed]
    untimed = [record for record in found if record.invalid]
    timed = sum(record.median_us is not None for record in found)
    text = f"{timed} times"
    text += f", {len(wrong)} wrong" if wrong else ""
    text += f", {len(untimed)} INVALID" if untimed else ""
    style = "bold red" if wrong or untimed else "bold green"
    console.print(f"\n{text}", style=style, highlight=False)
    return WRONG if wrong else COULD_NOT if untimed or not timed else 0


# ---- tables ------------------------------------------------------------------------------------------------


def show_run(console: Console, place: Place) -> None:
    """The device, the code, the versions."""
    run = place.run
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    options = "".join(f", {value} {name} for each" for name, value in place.options.items())
    console.print(
        f"{run.device.name}, {run.device.driver}{options}, {place.samples} samples in turns, "
        f"commit {run.commit}\n{versions}",
        highlight=False, markup=False,
    )  # fmt: skip


def show_products(console: Console, place: on_cpu.Cpu, ledger: Ledger) -> None:
    """How fast matrices multiply on this CPU."""
    found = on_cpu.products(place)
    ledger.add([found])
    if found.median_us:
        rate = found.flops / found.median_us / 1e3
        console.print(f"matrix products of {found.case}: {rate:.0f} GFLOP/s", highlight=False)


def show_case(console: Console, label: str, found: Sequence[Record]) -> None:
    """A table a protocol and promise, then why somebody has no time."""
    judged = [record for record in found if record.op in OPS]
    for protocol, promise in dict.fromkeys((record.protocol, record.precision) for record in judged):
        limits = [record for record in found if record.protocol == protocol and record.op not in OPS]
        here = [record for record in judged if (record.protocol, record.precision) == (protocol, promise)]
        ceiling, ours = ceiling_of(limits, promise), best(here)
        least = limit_us(ceiling, promise) if ceiling else None
        beside = f", {promise}" if promise else ""
        if ceiling is not None and least:
            beside += f": {least / 1e3:.4g} ms, the ceiling ({ceiling.op})"
        console.print(f"\n{label}, {protocol}{beside}", style="bold", highlight=False, markup=False)
        table = columns("", "ms", "/ ceiling", "/ ours", "bits", "error/bound")
        for record in here:
            table.add_row(escape(_name(record)), *_figures(record, least, ours.median_us if ours else None))
        console.print(table)
    for record in found:
        reason = record.invalid or (record.note if record.median_us is None else None)
        if reason:
            console.print(f"{_name(record)}: {reason}", style="red", highlight=False, markup=False)


def _name(record: Record) -> str:
    name = str(record.options.get("contender", record.kernel))
    return f"{name}, {record.precision}" if record.precision not in (None, "highest") else name


def ceiling_of(found: Sequence[Record], promise: str | None) -> Record | None:
    """The fastest of copy and stream; of products those that keep the promise."""
    kept = (None, *PRODUCTS.get(promise or "highest", ()))
    kinds = [record for record in found if record.precision in kept and record.median_us]
    return min(kinds, key=lambda record: limit_us(record, promise), default=None)


def best(found: Sequence[Record]) -> Record | None:
    """The fastest of ropegrad's own."""
    timed = [r for r in found if is_judged(r) and r.backend != "target" and r.median_us is not None]
    return min(timed, key=lambda record: record.median_us or 0.0, default=None)


def _figures(record: Record, ceiling: float | None, ours: float | None) -> list[str]:
    worst = max((ratio for ratio in record.error_over_bound.values() if ratio is not None), default=None)
    bits = min((bits for bits in record.effective_bits.values() if bits is not None), default=None)
    accuracy = ["-" if bits is None else f"{bits:.1f}", "-" if worst is None else f"{worst:.3g}"]
    if record.median_us is None:
        return ["INVALID" if record.invalid else "no time", "-", "-", *accuracy]
    ratios = [f"{record.median_us / other:.2f}" if other else "-" for other in (ceiling, ours)]
    text = f"{record.median_us / 1e3:.4g} ±{(record.spread_us or 0.0) / 1e3:.2g}"
    return [text + (" INVALID" if record.invalid else ""), *ratios, *accuracy]
