"""A verdict on a target for machines: JSON with every figure, JUnit with a test case for each rule."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec

from ropegrad.info import info
from ropegrad.verify.examine import INTERRUPTED, UNSTEADY, Broken, Examination
from ropegrad.verify.observed import contract_lines
from ropegrad.verify.ruling import RULES, Fault

VERDICTS = {
    0: "right",
    1: "wrong",
    2: "could not be judged",
    INTERRUPTED: "interrupted, no fault found so far",
}


def write(target: str, seen: Examination, seconds: float, json_file: Path | None, junit: Path | None) -> None:
    """Write the reports that are asked for."""
    if json_file is not None:
        text = msgspec.json.format(msgspec.json.encode(as_json(target, seen, seconds)), indent=1)
        json_file.write_bytes(text + b"\n")
    if junit is not None:
        ElementTree.indent(tree := ElementTree.ElementTree(as_junit(target, seen, seconds)))
        tree.write(junit, encoding="utf-8", xml_declaration=True)


def as_json(target: str, seen: Examination, seconds: float) -> dict[str, Any]:
    """Plain values; what is not finite becomes a string, since JSON has no such numbers."""
    worst: dict[str, float] = {}
    for trial in seen.trials:
        for name, ratio in trial.worst.items():
            worst[name] = max(ratio, worst.get(name, 0.0))
    return {
        "target": target,
        "verdict": VERDICTS[seen.status],
        "contract": asdict(seen.contract),
        "domain": asdict(seen.domain),
        "problems": seen.problems,
        "calls": seen.all_calls,
        "declined": seen.declined,
        "not_run": seen.not_run,
        "seconds": seconds,
        "rules": dict.fromkeys(RULES) | {one.rule: _broken(one) for one in seen.broken},
        "observed_contract": dict(contract_lines(seen)) if seen.status == 0 else {},
        "worst_error_over_bound": {name: _plain(ratio) for name, ratio in worst.items()},
        "info": info(),
    }


def _plain(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)


def _broken(one: Broken) -> dict[str, Any]:
    recipe = asdict(one.recipe)
    return {
        "problems": one.cases,
        "smallest": recipe,
        "faults": [_fault(fault) for fault in one.faults],
        "excused_by": one.excuses,
        "every_time": one.steady,
    }


def _fault(fault: Fault) -> dict[str, Any]:
    return {
        "output": fault.array,
        "message": fault.message,
        "where": dict(fault.axes),
        "error_over_bound": _plain(fault.ratio),
        "effective_bits": _plain(fault.bits),
        "diagnosis": list(fault.names),
    }


def as_junit(target: str, seen: Examination, seconds: float) -> ElementTree.Element:
    """A suite of one test case for each rule; an error where nothing could be judged."""
    broken = {one.rule: one for one in seen.broken}
    unjudged = {2: "it declines every problem", INTERRUPTED: VERDICTS[INTERRUPTED]}.get(seen.status)
    errors = int(unjudged is not None)
    counts = {"tests": len(RULES), "failures": len(broken), "errors": errors, "time": f"{seconds:.3f}"}
    suite = ElementTree.Element("testsuite", {"name": target} | {k: str(v) for k, v in counts.items()})
    for rule in RULES:
        case = ElementTree.SubElement(suite, "testcase", classname=target, name=rule, time="0")
        if rule in broken:
            one = broken[rule]
            text = "\n".join([str(one.recipe), *(_sentence(fault) for fault in one.faults)])
            failure = ElementTree.SubElement(case, "failure", message=one.faults[0].message, type=rule)
            text += "" if one.steady else f"\n{UNSTEADY}"
            failure.text = text + (f"\nexcused by {' or '.join(one.excuses)}" if one.excuses else "")
        elif errors:
            kind = "interrupted" if seen.status == INTERRUPTED else "declined"
            ElementTree.SubElement(case, "error", message=str(unjudged), type=kind)
            errors = 0
    return suite


def _sentence(fault: Fault) -> str:
    return fault.message + (f"; diagnosis: {'; '.join(fault.names)}" if fault.names else "")
