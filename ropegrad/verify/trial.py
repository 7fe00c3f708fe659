"""One problem put to a target: called several times, other data in between, and everything judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ropegrad.arrays import numpy_dtype
from ropegrad.spec import RopeSpec
from ropegrad.verify.again import Outputs, right_again, same_results
from ropegrad.verify.arena import Plan, fill, plan, trespasses, view
from ropegrad.verify.calling import FORWARD_VALUES, Answer
from ropegrad.verify.case import Case, NumpyArray, token_slices
from ropegrad.verify.check import SLICE
from ropegrad.verify.forward import forward_shapes, forward_standard
from ropegrad.verify.kept import OVERWRITTEN
from ropegrad.verify.oracle import expected
from ropegrad.verify.recipe import Recipe, contiguous
from ropegrad.verify.ruling import (
    ALLOWANCES,
    ROUNDS,
    Fault,
    Standard,
    form_fault,
    gate_fault,
    standard,
    value_fault,
)
from ropegrad.verify.runner import Runner
from ropegrad.verify.target import Contract

IN_TURN = (True, False, False, True, True, False, False, True)  # a cause left out, and there, of no period
REPEATABLE = "bitwise repeatable"
NOT_REPEATABLE = "not bitwise repeatable"


@dataclass
class Trial:
    """What one problem brought to light.

    status    right, wrong, declined
    got       the outputs that a fault of value is about, with the case they belong to
    given     the outputs that were not all zero
    contract  facts that are legal but worth knowing
    """

    recipe: Recipe
    status: str = "right"
    faults: list[Fault] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    contract: set[str] = field(default_factory=set)
    worst: dict[str, float] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)
    got: dict[str, tuple[Case, NumpyArray]] = field(default_factory=dict)
    calls: int = 0

    def add(self, fault: Fault) -> None:
        """Keep the first fault of a rule and an array; old results that come again are not overwritten."""
        self.status = "wrong"
        if fault.rule == OVERWRITTEN and any(old.rule == "stale output" for old in self.faults):
            return
        if not any((fault.rule, fault.array) == (old.rule, old.array) for old in self.faults):
            self.faults.append(fault)


def attempt(runner: Runner, recipe: Recipe, *, stop: bool = False) -> Trial:
    """Put a problem to a target; with `stop` only until the first fault."""
    draws = recipe.draws
    trial = Trial(recipe)
    cases = {draw: recipe.case(draw) for draw in draws}
    layouts = {draw: arrangement(runner.contract, case) for draw, case in cases.items()}
    earlier: Outputs = {}
    first: Outputs = {}
    for turn, draw in enumerate(draws):
        case, poison, last = cases[draw], ("number", "nan")[turn % 2], turn == len(draws) - 1
        answer = perform(runner, case, poison, trial, layouts[draw])
        if answer is None:
            return trial
        if last and same_results(answer.outputs, first):
            trial.contract.add(REPEATABLE)
        else:
            _judge(runner, case, answer, earlier, poison, trial)
            if last:
                trial.contract.add(NOT_REPEATABLE)
                trial.faults = right_again(trial.faults, trial.got, cases[draws[0]], answer.outputs)
        if stop and trial.faults:
            return trial
        earlier = answer.outputs
        first = first or answer.outputs
    return trial


def output_forms(case: Case, contract: Contract) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every output, the forward's values included, by name."""
    forms = {f"grad_{need}": case.spec.output(need) for need in case.spec.needs}
    return forms | (forward_shapes(case) if contract.of == "forward" else {})


def arrangement(contract: Contract, case: Case) -> Plan:
    """Where in memory everything lies that a call may touch."""
    forms = output_forms(case, contract) if contract.dps else {}
    return plan(case.inputs, [(name, _room(case, name, *form)) for name, form in forms.items()])


def perform(
    runner: Runner, case: Case, poison: str, trial: Trial, layout: Plan | None = None
) -> Answer | None:
    """One call; None where there is nothing to judge: the trial says why."""
    contract, forms = runner.contract, output_forms(case, runner.contract)
    layout = layout or arrangement(contract, case)
    memory = runner.arena(layout.nbytes)
    fill(memory, layout, case.inputs, poison)
    before = memory.copy()
    answer = runner.call(layout, tuple(forms), list(case.inputs), anew=trial.calls == 0)
    trial.calls += 1
    if answer.status == "declined" and trial.calls == 1:
        trial.status = "declined"
        trial.faults.append(Fault("declined", "", f"NotImplementedError: {answer.message}"))
        return None
    if answer.status != "returned":
        trial.add(Fault(answer.status, "", answer.message))
        return None
    for rule, array, text in answer.notes:
        trial.add(Fault(rule, array, text))
    for trespass in trespasses(before, memory, layout):
        rule = "input mutated" if trespass.array else "written outside the output"
        trial.add(Fault(rule, trespass.array, trespass.message))
    if contract.dps:
        answer.outputs = {slot.name: view(memory, slot).copy() for slot in layout.outputs}
    return answer


def _room(case: Case, name: str, shape: tuple[int, ...], dtype: str) -> NumpyArray:
    """An output to write into: with gaps where the inputs are not contiguous either."""
    kind = numpy_dtype(dtype)
    strided = any(x is not None and not x.flags.c_contiguous for x in case.inputs.values())
    if strided and shape and name in ("grad_q", "grad_cos", "grad_hidden_states"):
        return np.empty((*shape[:-1], shape[-1] + 3), kind)[..., : shape[-1]]
    return np.empty(shape, kind)


def _judge(runner: Runner, case: Case, answer: Answer, earlier: Outputs, poison: str, trial: Trial) -> None:
    sound = {}
    for name, form in output_forms(case, runner.contract).items():
        if name not in answer.outputs:
            if not any(array in (name, "") for _, array, _ in answer.notes):
                trial.add(Fault("missing gradient", name, f"{name} is not among the results"))
            continue
        got = answer.outputs[name]
        fault = form_fault(case, name, got, *form)
        if fault is not None:
            trial.add(fault)
        elif got is not None:
            sound[name] = got
    for part, mine, before in _parts(case, sound, earlier):
        for rule, names in standards(part, runner.contract):
            for name in names:
                if name in mine:
                    _judge_values(runner, rule, name, mine[name], before.get(name), poison, trial)


Arrays = dict[str, NumpyArray]


def _parts(case: Case, sound: Arrays, earlier: Outputs) -> Iterator[tuple[Case, Arrays, Arrays]]:
    """A case with its outputs and those of the call before; a large one of RoPE in runs of tokens."""
    spec = case.spec
    before = {n: x for n, x in earlier.items() if x is not None and n in sound and x.shape == sound[n].shape}
    tokens = SLICE
    if isinstance(spec, RopeSpec):
        token = spec.batch * ((spec.heads or 0) + (spec.kv_heads or 0)) * spec.head_dim
        tokens = max(SLICE // max(token, 1), 1)
    if not isinstance(spec, RopeSpec) or tokens >= spec.seq:
        yield case, sound, before
        return
    labels = {("got", n): x for n, x in sound.items()} | {("before", n): x for n, x in before.items()}
    start = 0
    for part, sliced in token_slices(case, labels, tokens):
        mine = {name: x for (whose, name), x in sliced.items() if whose == "got"}
        theirs = {name: x for (whose, name), x in sliced.items() if whose == "before"}
        yield replace(part, first_token=start), mine, theirs
        start += tokens


def standards(
    case: Case, contract: Contract, allowance: tuple[str, ...] = ()
) -> list[tuple[Standard, tuple[str, ...]]]:
    """The standards of a case and the outputs that each is about: gradients, and a forward's values."""
    found = [(standard(case, expected(case), allowance), case.outputs)]
    if contract.of == "forward":
        found.append((forward_standard(case, allowance), FORWARD_VALUES[contract.op]))
    return found


def _judge_values(
    runner: Runner, rule: Standard, name: str, got: NumpyArray, earlier: NumpyArray | None, poison: str,
    trial: Trial,
) -> None:  # fmt: skip
    if got.any():
        trial.given.add(name)
    if name in trial.got:  # one fault of an output is enough
        return
    ratio = rule.worst(name, got)
    allowance = () if ratio <= 1 else _allowance(rule, name, got)
    if allowance:
        trial.contract |= set(allowance)
        ratio = 1.0
    trial.worst[name] = max(ratio, trial.worst.get(name, 0.0))
    fault = None
    if ratio > 1:
        dps = poison if runner.contract.dps else None
        fault = value_fault(rule, name, got, earlier=earlier, dps=dps)
        if fault is not None and fault.rule in ("wrong value", "unjustified NaN or Inf"):
            fault = _blame_strides(runner, rule, name, fault)
    elif trial.recipe.values == "normal" and ROUNDS not in allowance and name in rule.case.outputs:
        fault, bits = gate_fault(rule, name, got)
        if not math.isnan(bits):
            trial.bits[name] = min(bits, trial.bits.get(name, math.inf))
    if fault is not None:
        trial.add(fault)
        trial.got.setdefault(name, (rule.case, got))


def _allowance(rule: Standard, name: str, got: NumpyArray) -> tuple[str, ...]:
    """The narrowest allowance under which the values are right; () if there is none."""
    for allowance in ALLOWANCES[1:]:
        if name in rule.case.outputs:
            wider = standard(rule.case, {name: rule.exact[name]}, allowance)
        else:
            wider = forward_standard(rule.case, allowance)
        if wider.worst(name, got) <= 1:
            return allowance
    return ()


def _blame_strides(runner: Runner, rule: Standard, name: str, fault: Fault) -> Fault:
    """The fault under another name if the same values in contiguous memory come out right."""
    strided = [n for n, x in rule.case.inputs.items() if x is not None and not _is_plain(x)]
    if not strided or rule.case.first_token:
        return fault
    plain = contiguous(rule.case, strided)
    for is_plain in IN_TURN:  # or a fault that comes and goes would be laid on the strides
        if _right(runner, rule, name, plain if is_plain else rule.case) != is_plain:
            return fault
    alone = [n for n in strided if _right(runner, rule, name, contiguous(rule.case, [n]))]
    words = ", ".join(_layout(n, rule.case.inputs[n]) for n in alone[:1] or strided)
    text = f"{fault.message}; right where that is contiguous: {words}"
    return replace(fault, rule="depends on strides or alignment", message=text)


def _is_plain(x: NumpyArray) -> bool:
    return bool(x.flags.c_contiguous and x.flags.aligned)


def _right(runner: Runner, rule: Standard, name: str, case: Case) -> bool:
    """Whether an output is right for a case of the same values."""
    answer = perform(runner, case, "nan", Trial(Recipe(case.spec)))
    got = None if answer is None else answer.outputs.get(name)
    return got is not None and got.shape == rule.exact[name].value.shape and rule.worst(name, got) <= 1


def _layout(name: str, x: NumpyArray | None) -> str:
    assert x is not None
    if not x.flags.aligned:
        return f"{name} is misaligned"
    return f"{name} has strides {[step // x.itemsize for step in x.strides]}"
