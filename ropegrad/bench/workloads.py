"""What `ropegrad bench` times: the benchmark's suites and a short choice of them, under any contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ropegrad.bench.contender import Spec
from ropegrad.cost import Cost, qkv_cost, rope_cost
from ropegrad.errors import SpecError
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.suites import SUITES, rope_suite
from ropegrad.verify.case import Case
from ropegrad.verify.conformance import seed
from ropegrad.verify.domain import EQUAL, Domain
from ropegrad.verify.draws import make_case
from ropegrad.verify.recipe import Recipe
from ropegrad.verify.target import Contract

HEADLINE = "headline"
WITHOUT_TABLES = {"rope-qk": "bhsd", "rope-qk-bshd": "bshd"}  # gradients of q and k alone, by layout
TIMED = (*SUITES, *WITHOUT_TABLES)
CHOICES = (HEADLINE, *TIMED, "all")
_WORDS = ("layout", "pairing", "table", "adjoint", "dtype", "table_dtype")


@dataclass(frozen=True)
class Problem:
    """A case to time, and the kind of its tables. suite: what it may be compared within."""

    suite: str
    name: str
    spec: Spec
    tables: str = "benchmark"

    @property
    def op(self) -> str:
        """Rope or qkv."""
        return "rope" if isinstance(self.spec, RopeSpec) else "qkv"

    @property
    def cost(self) -> Cost:
        """Bytes and FLOPs."""
        return rope_cost(self.spec) if isinstance(self.spec, RopeSpec) else qkv_cost(self.spec)

    def case(self, draw: str = "benchmark") -> Case:
        """The case with its data; another draw has other data of the same kinds."""
        return make_case(self.spec, seed(self.name, draw), tables=self.tables, name=self.name)


def timed_suite(name: str) -> dict[str, Spec]:
    """The cases of one of TIMED, or the four that the README quotes for CPUs."""
    if name == HEADLINE:
        return _headline()
    if name not in WITHOUT_TABLES:
        return dict(SUITES[name]())
    layout = WITHOUT_TABLES[name]
    return {case: replace(spec, needs=("q", "k"), layout=layout) for case, spec in rope_suite().items()}


def _headline() -> dict[str, Spec]:
    rope = RopeSpec(
        batch=1, heads=32, kv_heads=8, seq=2048, head_dim=128, rotary_dim=128, table_batch=1
    )  # fmt: skip
    return {
        "rope B=1 S=2048 H=32/8": rope,
        "rope B=1 S=8192 H=32/8": replace(rope, seq=8192),
        "rope B=1 S=2048 H=32/8 bfloat16": replace(rope, dtype="bfloat16", table_dtype="bfloat16"),
        "qkv B=1 S=2048": SUITES["qkv"]()["B=1 S=2048"],
    }


def problems(
    suite: str, contract: Contract, domain: Domain, *, case: str | None = None, only: str | None = None,
    quick: bool = False,
) -> list[Problem]:  # fmt: skip
    """The cases of a suite that lie in a domain, as a contract has them. only: of one operation.

    quick: the smallest case of each operation. Raises SpecError where none is left.
    """
    found = list(_every(suite, contract, domain))
    if case is not None:
        known = ", ".join(dict.fromkeys(problem.name for problem in found))
        found = [problem for problem in found if problem.name == case]
        if not found:
            raise SpecError(f"no case {case!r}: {known}")
    found = [problem for problem in found if only in (None, problem.op) and _inside(problem, domain)]
    if not found:
        raise SpecError(f"no case of suite {suite!r} is of this operation and lies in this domain")
    if not quick:
        return found
    by_op = {op: [problem for problem in found if problem.op == op] for op in SUITES}
    return [min(some, key=lambda problem: problem.cost.moved) for some in by_op.values() if some]


def _every(suite: str, contract: Contract, domain: Domain) -> Iterator[Problem]:
    changes, label = _changes(contract)
    for name in TIMED[:2] if suite == "all" else (suite,):
        for case, spec in timed_suite(name).items():
            op = "rope" if isinstance(spec, RopeSpec) else "qkv"
            real = name in WITHOUT_TABLES or domain.tables == "equal-halves"
            tables = ("llama3" if op == "rope" else "base10000") if real else "benchmark"
            made = _under(spec, contract, changes)
            if made is not None:
                yield Problem("-".join([op if name == HEADLINE else name, *label]), case, made, tables)


def _changes(contract: Contract) -> tuple[dict[str, Any], list[str]]:
    """Words of a contract that are not the default, as fields of a spec; and as parts of a suite's name."""
    default = Contract(op=contract.op)
    changes = {
        name: getattr(contract, name) for name in _WORDS if getattr(contract, name) != getattr(default, name)
    }
    label = ["half-tables" if name == "table" else word for name, word in changes.items()
             if not name.endswith("dtype")]  # fmt: skip
    if contract.table_shape != "bsd":
        label.append(contract.table_shape)
    if contract.needs:
        label.append(",".join(contract.wanted))
    return changes, label


def _under(spec: Spec, contract: Contract, changes: dict[str, Any]) -> Spec | None:
    """The spec with these changes; None where they are words of the other operation."""
    if isinstance(spec, QkvSpec):
        if "adjoint" in changes or (contract.needs and contract.op == "rope"):
            return None
        rope = replace(spec.rope, **changes, table_batch=contract.table_batch(spec.rope.batch))
        needs = contract.wanted if contract.needs else spec.needs
        return replace(spec, rope=rope, precision=contract.precision, needs=needs)
    if contract.needs and contract.op == "qkv":
        return None
    needs = contract.wanted if contract.needs else spec.needs
    return replace(spec, **changes, table_batch=contract.table_batch(spec.batch), needs=needs)


def _inside(problem: Problem, domain: Domain) -> bool:
    tables = problem.tables if problem.tables in EQUAL else "benchmark"
    return domain.outside(Recipe(problem.spec, tables=tables)) is None
