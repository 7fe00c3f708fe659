"""The backends in order of preference, and how one is chosen."""

from __future__ import annotations

from ropegrad.backends.base import Backend
from ropegrad.backends.cupy_fused import CupyFused
from ropegrad.backends.cupy_plain import CupyPlain
from ropegrad.backends.cupy_tensor import CupyTensor
from ropegrad.backends.numba_cpu import NumbaCpu
from ropegrad.backends.numpy_tiled import NumpyTiled
from ropegrad.backends.portable import Portable
from ropegrad.errors import SpecError
from ropegrad.spec import QkvSpec, RopeSpec
from ropegrad.tiles import channels

SMALL = 1 << 16  # channels that NumPy is through with before compiled code is loaded

BACKENDS: tuple[Backend, ...] = (NumbaCpu(), NumpyTiled(), CupyFused(), CupyTensor(), CupyPlain(), Portable())
_COMPILED_LAST = tuple(sorted(BACKENDS, key=lambda backend: isinstance(backend, NumbaCpu)))


def find(name: str) -> Backend:
    """The backend called `name`; SpecError if there is none."""
    for backend in BACKENDS:
        if isinstance(name, str) and backend.name == name:
            return backend
    names = ", ".join(repr(backend.name) for backend in BACKENDS)
    raise SpecError(f"backend={name!r} is unknown: it must be one of {names}")


def order(spec: RopeSpec | QkvSpec) -> tuple[Backend, ...]:
    """The backends, the first choice for a problem of this size first."""
    return BACKENDS if channels(spec) >= SMALL else _COMPILED_LAST


def why_behind(other: Backend, chosen: Backend, spec: RopeSpec | QkvSpec) -> str:
    """Why `other`, which can run `spec`, is not the one that was chosen without a name."""
    if BACKENDS.index(other) < BACKENDS.index(chosen):
        return (
            f"it can run this, but {chosen.name} is preferred for fewer than {SMALL:,} channels, here "
            f"{channels(spec):,}: it has no compiled code to load"
        )
    return f"it can run this, but {chosen.name} is preferred"


def choose(spec: RopeSpec | QkvSpec, name: str | None) -> Backend:
    """The backend called `name`, or the first that can run `spec`; SpecError with the reason if it cannot."""
    if name is not None:
        backend = find(name)
        reason = backend.why_not(spec)
        if reason is not None:
            raise SpecError(f"backend={name!r} cannot run this: {reason}")
        return backend
    reasons = []
    for backend in order(spec):
        reason = backend.why_not(spec)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise SpecError("no backend can run this: " + "; ".join(reasons))
