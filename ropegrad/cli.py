"""The command `ropegrad`: words in, tables out; no maths."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
from rich.console import Console
from rich.table import Table

import ropegrad

if TYPE_CHECKING:
    from ropegrad.target_terminal import Limits
    from ropegrad.verify.domain import Domain
    from ropegrad.verify.target import Contract

app = cyclopts.App(
    name="ropegrad",
    help="Exact, verified gradients of rotary position embedding and of the QKV projections before it.",
    version=ropegrad.__version__,
    suppress_keyboard_interrupt=False,  # `main` says that it was interrupted
)


class Screen(Console):
    """A console whose reader may go: rich would end the program as if the verdict were "wrong"."""

    def on_broken_pipe(self) -> None:
        """Leave it to `main`."""
        raise BrokenPipeError


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.replace(",", " ").split()))


@cyclopts.Parameter(name="*")
@dataclass(kw_only=True)
class Judged:
    """How a TARGET is called, what it promises and for which problems.

    Parameters
    ----------
    op
        rope (problem 068) or qkv (problem 064). Default: rope.
    of
        backward, or forward: a differentiable forward of torch or jax, whose gradients are judged.
    dps
        The target writes into outputs that come last among its arguments.
    arrays
        The kind of arrays that the target takes. Default: numpy.
    device
        Default: cuda for cupy, else cpu.
    precision
        The promise of its matrix products. Default: highest; bench times all on a GPU.
    needs
        Inputs whose gradients it gives, as "q,k". Default: all of the problem's.
    table_shape
        Tables are [B, S, .], [1, S, .] or [S, .].
    head_dim
        Domain: head sizes it takes, as "64,128". Default: any.
    gqa
        Domain: ratios H / Hkv it takes, as "1,4". Default: any.
    max_tokens
        Domain: the longest sequence.
    tables
        Domain: any, or only tables with two equal columns in a pair.
    strides
        Domain: any memory layout, or contiguous arrays only.
    empty
        Domain: whether axes of size 0 may come.
    rotary
        Domain: full, all channels rotated; any, some may pass through.
    timeout
        Seconds a call may take; the first may take five times as long.
    memory
        GiB that the target may take beyond its imports.
    """

    op: Literal["rope", "qkv"] | None = None
    of: Literal["backward", "forward"] = "backward"
    dps: Annotated[bool, cyclopts.Parameter(negative="")] = False
    arrays: Literal["numpy", "torch", "cupy", "jax"] | None = None
    device: Literal["cpu", "cuda"] | None = None
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    table_dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None
    table_shape: Literal["bsd", "1sd", "sd"] = "bsd"
    layout: Literal["bhsd", "bshd", "sbhd"] = "bhsd"
    pairing: Literal["half", "interleaved"] = "half"
    table: Literal["full", "half"] = "full"
    adjoint: Literal["exact", "paired"] = "exact"
    precision: Literal["highest", "high", "medium"] | None = None
    needs: str = ""
    head_dim: str = ""
    gqa: str = ""
    max_tokens: int | None = None
    tables: Literal["any", "equal-halves"] = "any"
    strides: Literal["any", "contiguous"] = "any"
    empty: Literal["yes", "no"] = "yes"
    rotary: Literal["full", "any"] = "full"
    timeout: float = 30.0
    memory: float = 8.0

    def facts(self) -> tuple[Contract, Domain, Limits]:
        """The same, as the verifier has it; SpecError where the words do not fit together."""
        from ropegrad.target_terminal import Limits
        from ropegrad.verify.domain import Domain
        from ropegrad.verify.target import Contract

        contract = Contract(
            op=self.op or "rope", of=self.of, arrays=self.arrays or "numpy", dps=self.dps, dtype=self.dtype,
            device=self.device or ("cuda" if self.arrays == "cupy" else "cpu"),
            table_dtype=self.table_dtype or self.dtype, table_shape=self.table_shape, layout=self.layout,
            pairing=self.pairing, table=self.table, adjoint=self.adjoint,
            precision=self.precision or "highest", needs=_words(self.needs),
        )  # fmt: skip
        domain = Domain(
            head_dim=_numbers("head-dim", self.head_dim), gqa=_numbers("gqa", self.gqa),
            max_tokens=self.max_tokens, tables=self.tables, strides=self.strides, empty=self.empty,
            rotary=self.rotary,
        )  # fmt: skip
        return contract, domain, Limits(timeout=self.timeout, memory=self.memory)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in _words(text))
    except ValueError:
        found = ()
    if text and not found:
        raise ropegrad.SpecError(f"--{option} {text!r}: write whole numbers, as 64,128")
    return found


@app.command
def verify(
    target: str | None = None,
    /,
    *,
    judged: Judged | None = None,
    suite: Literal["rope", "qkv", "all"] | None = None,
    backend: str | None = None,
    quick: Annotated[bool, cyclopts.Parameter(negative="")] = False,
    json: Annotated[Path | None, cyclopts.Parameter(help="Also write every figure to this file.")] = None,
    junit: Path | None = None,
    repro: Path | None = None,
) -> int:
    """Judge gradients: every element of every output, against an exact oracle.

    With TARGET, a function of yours: package.module:function or path/to/file.py:function. It is called with
    the problem's inputs in the problem's order, in a process of its own, on dozens of problems; a wrong
    one gets its fault named. Without TARGET, ropegrad's own backends: the named edge cases and the 16 + 16
    workloads of benchmark problems 068 (rope) and 064 (qkv), on inputs as the benchmark draws them and as
    training sees them. Exit status: 0 right, 1 wrong, 2 could not be judged.

    Parameters
    ----------
    target
        The function to judge.
    suite
        The 16 workloads of these operations, too; without TARGET which operation (default: all).
    backend
        Without TARGET: only this backend; default: all that can run here.
    quick
        Without TARGET: the named edge cases only: seconds instead of minutes.
    junit
        With TARGET: also write a JUnit report, a test case for each rule.
    repro
        With TARGET: write the smallest failure as a script that needs only NumPy and the target.
    """
    from ropegrad import target_terminal, terminal

    if target is None:
        if (judged is not None and judged != Judged()) or junit or repro:
            error = ropegrad.SpecError("these options say how a TARGET is judged: name one")
            return target_terminal.refuse(Screen(), error)
        return terminal.verify(Screen(), suite or "all", backend, quick=quick, json_file=json)
    screen = Screen()
    try:
        if quick or backend is not None:
            raise ropegrad.SpecError(
                "--quick and --backend are of ropegrad's own backends: leave TARGET away"
            )
        facts = (judged or Judged()).facts()
    except ropegrad.SpecError as error:
        return target_terminal.refuse(screen, error)
    suites = () if suite is None else (facts[0].op,) if suite == "all" else (suite,)
    reports = target_terminal.Reports(json=json, junit=junit, repro=repro)
    return target_terminal.verify(screen, target, *facts, suites, reports)[0]


@app.command
def fuzz(
    target: str,
    /,
    *,
    judged: Judged | None = None,
    examples: int | None = None,
    minutes: float | None = None,
    jobs: int = 1,
    database: Path = Path(".hypothesis"),
    seed: int | None = None,
    json: Path | None = None,
    junit: Path | None = None,
    repro: Path | None = None,
) -> int:
    """Look for a problem that TARGET gets wrong, and make it small.

    Problems are drawn by Hypothesis: sizes, memory layouts, values, tables. Failures are kept in a database,
    so that the next run tries them first. Exit status: 0 nothing found, 1 wrong, 2 could not be judged, 130
    interrupted (Ctrl-C) before anything was found.

    Parameters
    ----------
    target
        The function to judge: package.module:function or path/to/file.py:function.
    examples
        Problems to try. Default: 1000, or as many as there is time for with --minutes.
    minutes
        Time to look for. It can be interrupted; the next run goes on with other problems.
    jobs
        Processes that look at the same time.
    database
        Folder for failures; several runs and machines may share it.
    seed
        Of the first problems; default: a new one every time.
    json
        Also write every figure to this file.
    junit
        Also write a JUnit report, a test case for each rule.
    repro
        Write the smallest failure to this file, as a script that needs only NumPy and the target.
    """
    from ropegrad import fuzz_terminal, target_terminal

    screen = Screen()
    try:
        facts = (judged or Judged()).facts()
        if jobs < 1:
            raise ropegrad.SpecError(f"--jobs {jobs}: at least one process must look")
        tries = 1000 if examples is None and minutes is None else examples
        effort = fuzz_terminal.Effort(
            examples=tries, minutes=minutes, jobs=jobs, database=database, seed=seed
        )
    except ropegrad.SpecError as error:
        return target_terminal.refuse(screen, error)
    reports = target_terminal.Reports(json=json, junit=junit, repro=repro)
    return fuzz_terminal.fuzz(screen, target, *facts, effort, reports)[0]


@app.command
def limits(
    *,
    json: Annotated[
        Path | None, cyclopts.Parameter(help="Write the records to this file, one a line.")
    ] = None,
    commit: str | None = None,
) -> int:
    """What no GPU time can beat: makers' datasheets, and ceilings measured on the GPU that is here.

    Measures, for each case of the rope suite, a device-to-device copy and a tuned stream kernel that reads
    twice what it writes, at the case's bytes; and matrix products at each precision. Without a GPU it shows
    the datasheets and says why nothing was measured.

    Parameters
    ----------
    commit
        Recorded as the code's commit; default: what git says.
    """
    from ropegrad.bench.terminal import show

    return show(Screen(), json_file=json, commit=commit)


Several = cyclopts.Parameter(consume_multiple=True, negative="")


@app.command
def bench(
    *targets: str,
    judged: Judged | None = None,
    suite: Literal["headline", "rope", "qkv", "rope-qk", "rope-qk-bshd", "all"] | None = None,
    case: str | None = None,
    backend: Annotated[tuple[str, ...], Several] = (),
    protocol: Annotated[tuple[Literal["span", "graph", "wall"], ...], Several] = (),
    without_rivals: Annotated[bool, cyclopts.Parameter(negative="")] = False,
    quick: Annotated[bool, cyclopts.Parameter(negative="")] = False,
    threads: int | None = None,
    samples: int | None = None,
    json: Annotated[Path | None, cyclopts.Parameter(help="Add the records to this file, one a line.")] = None,
    commit: str | None = None,
    reproduce: Path | None = None,
) -> int:
    """How fast gradients are: ropegrad's backends, your TARGETs, and what else is installed.

    On the GPU if CuPy sees one, else on the CPU; --arrays cupy or numpy says which. Everybody is checked on
    the inputs that are then timed, and who is wrong has no time; then all take turns, beside what the device
    can do at best (a copy of the same bytes, bare matrix products). What cannot be measured as it was asked
    for is recorded as INVALID, with the reason. It may be interrupted: the same command with --json goes on
    with the cases that the file lacks. Exit status: 0, or 1 if a backend of ropegrad or a target is wrong, or
    2 if something could not be measured.

    Parameters
    ----------
    targets
        Functions of yours, package.module:function or path/to/file.py:function, called in this process.
    suite
        The 16 cases of benchmark problem 068 (rope) or 064 (qkv), or both (all); the gradients of q and k
        alone (rope-qk, and in the layout bshd); or headline, four cases, which is the default.
    case
        Only the case of this name.
    backend
        Only these backends of ropegrad's; default: all that can run here.
    protocol
        How a time is read: span (first kernel's start to last kernel's end), graph (a captured CUDA graph),
        wall (the host's clock). Default: span and graph on a GPU, wall on a CPU.
    without_rivals
        Leave PyTorch, JAX, Triton, Liger-Kernel and plain NumPy out.
    quick
        The smallest case of each operation, five samples, no torch.compile: under a minute on a CPU.
    threads
        On a CPU, for each contender; default: a thread a core that this process may use.
    samples
        Calls that are timed of each contender; the median is shown. Default: 15 on a CPU, 30 on a GPU.
    commit
        Recorded as the code's commit; default: what git says.
    reproduce
        A file of records: measure its cases again, on as many threads or on the GPU that is here, and show
        old, new and ratio. Exit status 0 if every time is within 3 % or 0.3 µs, else 1.
    """
    from ropegrad import records
    from ropegrad.bench.asked import Asked, judge_again, settle
    from ropegrad.bench.bench_terminal import bench as measure
    from ropegrad.bench.place import Choice
    from ropegrad.bench.reproduce_terminal import reproduce as measure_again

    screen, said = Screen(), judged or Judged()
    try:
        if (said.timeout, said.memory) != (Judged.timeout, Judged.memory):
            raise ropegrad.SpecError("--timeout and --memory bound a process of its own: use ropegrad verify")
        op = said.op or ("qkv" if suite == "qkv" else "rope")
        contract, domain, _ = replace(said, op=op).facts()
        choice = Choice(backend, not without_rivals, quick, (said.precision,) if said.precision else ())
        asked = Asked(
            suite=suite, op=said.op, targets=targets, contract=contract, domain=domain, arrays=said.arrays,
            case=case, protocols=protocol, choice=choice,
            threads=threads, samples=samples, json=json, commit=commit,
        )  # fmt: skip
        records.probe(json)
        if reproduce is None:
            return measure(screen, asked)
        judge_again(asked)
        settle(asked)
    except (ropegrad.SpecError, OSError) as error:
        screen.print(f"ropegrad bench: {error}", style="bold red", highlight=False, markup=False)
        return 2
    return measure_again(screen, reproduce, samples=samples, json_file=json, commit=commit)


@app.command
def report(
    *records: Path,
    out: Annotated[Path, cyclopts.Parameter(name=["--out", "-o"])],
    protocol: Literal["graph", "wall", "span/cupti", "span/events"] | None = None,
) -> int:
    """Figures, tables and one page (index.html, no network needed) from files of records.

    Every picture is written for light and dark backgrounds; tables.md holds the tables for a README.

    Parameters
    ----------
    records
        Files of records: one JSON line a measured case.
    out
        The folder to write into; it is made if need be.
    protocol
        Which protocol's times the figures show; default: of each device graph, else wall, else span. The
        tables show all.
    """
    from ropegrad.report.terminal import report as write

    return write(Screen(), records, out, protocol)


@app.command
def info() -> int:
    """Versions, devices, BLAS, and which backends can run here and why the others cannot."""
    from ropegrad.info import info as gather

    table = Table(show_header=False, box=None)
    for key, value in gather().items():
        lines = value.items() if isinstance(value, dict) else [(key, value)]
        for name, fact in lines:
            text = ", ".join(fact) if isinstance(fact, list) else fact
            label = name if name == key else f"{key.removesuffix('s')} {name}"
            table.add_row(label, "not installed" if text is None else str(text))
    Screen().print(table)
    return 0


def main() -> None:
    """Run the command line; exit with its status (2: it was called wrongly)."""
    try:
        status = app(sys.argv[1:], exit_on_error=False, result_action="return_value")
    except cyclopts.CycloptsError:  # it has printed what is wrong
        status = 2
    except BrokenPipeError:  # whoever read the output has gone: nothing can be said, least of all "right"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 2
    except Exception:  # not a verdict: 1 means wrong, and only a judgement may say so
        traceback.print_exc()
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status if isinstance(status, int) else 0)
