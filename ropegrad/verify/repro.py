"""A script that shows a fault again with nothing but NumPy and the target."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ropegrad.errors import SpecError
from ropegrad.verify.case import Case, NumpyArray
from ropegrad.verify.ruling import Fault
from ropegrad.verify.target import Contract
from ropegrad.verify.trial import output_forms, standards

READABLE = 64  # elements of an array that is written out as numbers
MOST = 2_000_000  # elements of all arrays of a script

_HEAD = '''#!/usr/bin/env python3
"""{target} is wrong: {rule}.

{message}

Problem: {problem}.
Exits with 1 while the fault is there and 0 once it is gone. Needs NumPy and the target, with the arrays
that it takes, nothing else.
"""
'''


def script(
    target: str,
    contract: Contract,
    cases: list[Case],
    fault: Fault,
    seconds: float,
    allowance: tuple[str, ...] = (),
) -> str:
    """The text of the script: the fault in words, the problems with exact results and bounds, the checks.

    Raises SpecError where there is no such script: JAX arrays, or too many elements.
    """
    if contract.arrays == "jax":
        raise SpecError("--repro writes scripts for targets that take NumPy, PyTorch or CuPy arrays, not JAX")
    if sum(x.size for case in cases for x in case.inputs.values() if x is not None) > MOST:
        raise SpecError("--repro: the smallest problem found is too large for a script; try ropegrad fuzz")
    place, _, name = target.rpartition(":")
    absolute = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else target
    head = _HEAD.format(
        target=target, rule=fault.rule, message=fault.message.replace("\\", "/").replace('"""', "'''"),
        problem=cases[0].name,
    )  # fmt: skip
    body = (Path(__file__).parent / "repro_body.py").read_text(encoding="utf-8")
    body = body[body.index("from __future__") :]
    calls = "".join(_call(case, contract, allowance) for case in cases)
    data = f"\n\nnan, inf = np.nan, np.inf\nTARGET = {absolute!r}\nCALLS = [\n{calls}]\n"
    how = {
        "arrays": contract.arrays, "device": contract.device, "dps": contract.dps,
        "forward": contract.of == "forward", "most": contract.most,
    }  # fmt: skip
    end = f"\nif __name__ == '__main__':\n    sys.exit(main(TARGET, CALLS, {how!r}, {seconds!r}))\n"
    return f"{head}{body}{data}{end}"


def _call(case: Case, contract: Contract, allowance: tuple[str, ...]) -> str:
    lines = ["    {\n        'inputs': {\n"]
    lines += [f"            {n!r}: {_input(x)},\n" for n, x in case.inputs.items() if x is not None]
    lines.append("        },\n")
    forms = output_forms(case, contract)
    lines.append(f"        'dtypes': { {name: form[1] for name, form in forms.items()}!r},\n")
    exact: dict[str, NumpyArray] = {}
    bound: dict[str, NumpyArray] = {}
    state: dict[str, NumpyArray] = {}
    for rule, names in standards(case, contract, allowance):
        for name in names:
            exact[name], low = rule.exact[name].value, rule.exact[name].low
            bound[name] = rule.bound[name] + (0.0 if low is None else np.abs(low))
            must = rule.must[name]
            state[name] = np.zeros((), np.int8) if must is None or not must.any() else must
    for label, arrays in (("exact", exact), ("bound", bound), ("state", state)):
        lines.append(f"        {label!r}: {{\n")
        lines += [f"            {name!r}: {_array(arrays[name])},\n" for name in forms]
        lines.append("        },\n")
    return "".join([*lines, "    },\n"])


def _input(x: NumpyArray) -> str:
    shift = x.__array_interface__["data"][0] % x.itemsize if x.size else 0
    if x.strides == np.empty(x.shape, x.dtype).strides and not shift:  # flags ignore axes of size 1
        return _array(x)
    return f"lay({_array(np.ascontiguousarray(x))}, {x.strides}, {shift})"


def _array(x: Any) -> str:
    kind = f"number_type({str(x.dtype)!r})"
    if x.size <= READABLE:
        numbers = [int(v) if x.dtype.kind == "i" else float(v) for v in x.ravel()]
        return f"np.array({numbers!r}, {kind}).reshape({x.shape})"
    text = base64.b85encode(zlib.compress(np.ascontiguousarray(x).tobytes(), 9)).decode()
    return f"unpack({text!r}, {str(x.dtype)!r}, {x.shape})"
