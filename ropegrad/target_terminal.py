"""What `ropegrad verify TARGET` shows: progress, a line a rule, the contract, the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ropegrad import records, target_report
from ropegrad.errors import SpecError
from ropegrad.spec import judge_positive
from ropegrad.verify.battery import battery, beyond, property_recipes, size, suite, table_shapes
from ropegrad.verify.domain import Domain
from ropegrad.verify.examine import INTERRUPTED, UNSTEADY, Broken, Examination, examine
from ropegrad.verify.observed import contract_lines
from ropegrad.verify.process import Process
from ropegrad.verify.repro import script
from ropegrad.verify.ruling import RULES
from ropegrad.verify.target import Contract, NoTarget

COULD_NOT = 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a target may take: seconds a call, GiB beyond its imports."""

    timeout: float = 30.0
    memory: float = 8.0

    def __post_init__(self) -> None:
        judge_positive("timeout", self.timeout)
        judge_positive("memory", self.memory)

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return int(self.memory * 2**30)


@dataclass(frozen=True, kw_only=True)
class Reports:
    """Files to write: every figure, a test report, a script that shows the smallest failure again."""

    json: Path | None = None
    junit: Path | None = None
    repro: Path | None = None

    def probe(self) -> None:
        """OSError where one cannot be written."""
        records.probe(self.json, self.junit, self.repro)

    def write(
        self, console: Console, target: str, contract: Contract, limits: Limits, seen: Examination,
        seconds: float,
    ) -> None:  # fmt: skip
        """Write them; the script only if there is a failure."""
        target_report.write(target, seen, seconds, self.json, self.junit)
        if self.repro is None or not seen.broken:
            return
        smallest = min(seen.broken, key=lambda one: size(one.recipe))
        cases = [smallest.recipe.case(draw) for draw in dict.fromkeys(smallest.recipe.draws)]
        try:
            text = script(target, contract, cases, smallest.faults[0], 10 * limits.timeout, seen.allowance)
        except SpecError as error:
            console.print(str(error), style="yellow", highlight=False, markup=False)
            return
        self.repro.write_text(text, encoding="utf-8")
        console.print(f"shown again by: python {self.repro}", highlight=False, markup=False)


def verify(
    console: Console,
    target: str,
    contract: Contract,
    domain: Domain,
    limits: Limits,
    suites: tuple[str, ...] = (),
    reports: Reports = Reports(),
) -> tuple[int, Examination | None]:
    """Judge a target; exit status 0 right, 1 wrong, 2 could not be judged, and all that was seen."""
    start = time.perf_counter()
    try:
        reports.probe()
        recipes = battery(contract, domain)
        for name in suites:
            if name != contract.op:
                raise SpecError(f"--suite {name} is not of --op {contract.op}")
            recipes += suite(name, contract, domain)
        strange, more = beyond(contract, domain), property_recipes(contract, domain)
        shapes = table_shapes(contract, domain)
        show_heading(console, target, contract, domain)
        with (
            Process(target, contract, timeout=limits.timeout, memory=limits.nbytes) as process,
            _progress(console, len(recipes) + len(strange) + len(more) + len(shapes)) as progress,
        ):
            seen = examine(process, recipes, domain, progress, strange, more, shapes)
    except (NoTarget, SpecError, OSError) as error:
        return refuse(console, error), None
    seconds = time.perf_counter() - start
    show(console, seen, seconds)
    reports.write(console, target, contract, limits, seen, seconds)
    return seen.status, seen


def refuse(console: Console, error: Exception) -> int:
    """Say why there is no verdict."""
    console.print(f"could not be judged: {error}", style="bold red", highlight=False, markup=False)
    return COULD_NOT


def show_heading(console: Console, target: str, contract: Contract, domain: Domain) -> None:
    """What is judged, as what, and for which problems."""
    call = f"{contract.of}{', writing into its last arguments' if contract.dps else ''}"
    options = f"{contract.arrays} {contract.dtype} on {contract.device}, layout {contract.layout}"
    options += f", {contract.pairing} pairing, {contract.table} tables"
    options += f" of {contract.table_dtype}" if contract.table_dtype != contract.dtype else ""
    if contract.op == "qkv":
        options += f", precision {contract.precision}"
    elif contract.adjoint != "exact":
        options += f", adjoint {contract.adjoint}"
    console.print(f"[bold]{escape(target)}[/]: {contract.op} {call}; {options}", highlight=False)
    words = [f"head size {_any(domain.head_dim)}", f"GQA ratio {_any(domain.gqa)}"]
    words += [f"tokens {'any' if domain.max_tokens is None else f'up to {domain.max_tokens}'}"]
    words += [f"rotary width {domain.rotary}", f"tables {domain.tables}", f"strides {domain.strides}"]
    words += [f"empty axes {domain.empty}"]
    console.print(f"domain: {', '.join(words)}", style="dim", highlight=False)


def _any(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values)) or "any"


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Callable[[str], None]]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("importing the target", total=steps)
        done = -1

        def progress(what: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=escape(what))

        yield progress


def show(console: Console, seen: Examination, seconds: float) -> None:
    """A line a rule, what broke it, the contract, the verdict."""
    console.print()
    if seen.status != INTERRUPTED:
        show_rules(console, seen.broken)
    lines = contract_lines(seen) if seen.status == 0 else []
    if lines:
        console.print("\ncontract: legal, but worth knowing", style="bold", highlight=False)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2), pad_edge=False)
        for what, text in lines:
            table.add_row("", what, escape(text))
        console.print(table)
    counts = f"{seen.problems} problems, {seen.all_calls} calls, {seconds:.1f} s"
    counts += f"; {seen.declined} declined" if seen.declined else ""
    counts += f"; {seen.not_run} not run after hangs or crashes" if seen.not_run else ""
    rules = f"{len(seen.broken)} rule{'s' if len(seen.broken) > 1 else ''} broken"
    verdict = {
        0: "RIGHT", 1: f"WRONG, {rules}", 2: "could not be judged: it declines everything",
        INTERRUPTED: f"interrupted after {seen.problems:,} examples, no fault found so far",
    }  # fmt: skip
    style = {0: "bold green", INTERRUPTED: "yellow"}.get(seen.status, "bold red")
    console.print(f"\n{verdict[seen.status]} ({counts})", style=style, highlight=False)


def show_rules(console: Console, broken: list[Broken]) -> None:
    """Rules that were kept in one line each, broken ones with all that is known."""
    by_rule = {one.rule: one for one in broken}
    for rule in RULES:
        if rule not in by_rule:
            console.print(f"[green]ok[/]  {rule}", highlight=False)
            continue
        one = by_rule[rule]
        cases = f"in {one.cases} problem{'s' if one.cases > 1 else ''}"
        console.print(f"[bold red]NO  {rule}[/] {cases}; the smallest: {escape(str(one.recipe))}",
                      highlight=False, soft_wrap=False)  # fmt: skip
        for line in details(one):
            console.print(Padding(escape(line), (0, 0, 0, 4)), highlight=False)


def details(one: Broken) -> Iterator[str]:
    """Sentences about a broken rule."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for fault in one.faults:
        yield fault.message
        if fault.names:
            alike.setdefault(fault.names, []).append(fault.array)
    for names, arrays in alike.items():
        yield f"diagnosis: {', '.join(arrays)}: {'; '.join(names)}"
    if not one.steady:
        yield UNSTEADY
    if one.excuses:
        yield f"no fault was seen inside the domain {' or '.join(one.excuses)}"
