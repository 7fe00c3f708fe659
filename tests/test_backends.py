"""Every backend, in every namespace, on any problem: inside the derived bounds, inputs unharmed."""

import warnings

import pytest
from conftest import need, skip
from hypothesis import given, settings
from hypothesis import strategies as st

from ropegrad.backends.cupy_plain import no_gpu
from ropegrad.verify.case import Case
from ropegrad.verify.cases import EDGE_CASES
from ropegrad.verify.check import check
from ropegrad.verify.runners import run_backend
from ropegrad.verify.strategies import cases, qkv_specs, rope_specs

PAIRS = {
    "numpy_tiled": ("numpy_tiled", "numpy", None),
    "numba_cpu": ("numba_cpu", "numpy", "cpu"),
    "portable": ("portable", "numpy", None),
    "portable-array_api_strict": ("portable", "array_api_strict", "test"),
    "portable-torch": ("portable", "torch", "interop"),
    "portable-jax": ("portable", "jax", "interop"),
    "portable-dask": ("portable", "dask", "dask"),
    "cupy_fused": ("cupy_fused", "cupy", "cuda13"),
    "cupy_plain": ("cupy_plain", "cupy", "cuda13"),
}
EXAMPLES = {"portable-jax": 30, "portable-dask": 40}  # every new shape is compiled or planned anew
FROZEN = ("jax", "dask")  # cannot be written: no out=, so nothing to accumulate into
ROPE_ONLY = ("cupy_fused",)
NATIVE = ("float32", "float64")  # the dtypes that array-api-strict has


@pytest.fixture(params=PAIRS, scope="module")
def pair(request):
    backend, namespace, extra = PAIRS[request.param]
    if extra is not None:
        need({"dask": "dask.array"}.get(namespace, "numba" if extra == "cpu" else namespace), extra)
    if namespace == "cupy" and no_gpu() is not None:
        skip(no_gpu(), required=False)
    if namespace == "jax":
        need("jax", "interop").config.update("jax_enable_x64", True)
    return request.param, backend, namespace


def judge(case: Case, backend: str, namespace: str, into: bool) -> None:
    frozen = namespace in FROZEN
    if frozen and case.spec.accumulate:
        return
    with warnings.catch_warnings():
        if namespace == "dask":  # its own threads do not see our silence about NaN and overflow
            warnings.filterwarnings("ignore", "(overflow|invalid value) encountered", RuntimeWarning)
        verdict = check(
            case,
            lambda case: run_backend(case, backend, namespace, into=into and not frozen),
            flushes=namespace == "jax",  # XLA on CPUs flushes subnormals to zero
        )
    assert verdict.passed, verdict.findings


def native(namespace: str, case: Case) -> bool:
    geometry = getattr(case.spec, "rope", case.spec)
    return namespace != "array_api_strict" or {geometry.dtype, geometry.table_dtype} <= set(NATIVE)


@pytest.mark.parametrize("op", ["rope", "qkv"])
def test_edge_cases(pair, op):
    _, backend, namespace = pair
    if op == "qkv" and backend in ROPE_ONLY:
        skip(f"{backend} has RoPE alone, not the projections", required=False)
    for case in EDGE_CASES[op]():
        if native(namespace, case):
            judge(case, backend, namespace, into=False)
            if namespace not in FROZEN:
                judge(case, backend, namespace, into=True)


@pytest.mark.parametrize("specs", [rope_specs, qkv_specs], ids=["rope", "qkv"])
def test_any_problem(pair, specs):
    name, backend, namespace = pair
    if specs is qkv_specs and backend in ROPE_ONLY:
        skip(f"{backend} has RoPE alone, not the projections", required=False)
    dtypes = NATIVE if namespace == "array_api_strict" else ("float16", "bfloat16", "float32", "float64")

    @settings(max_examples=min(EXAMPLES.get(name, 150), settings().max_examples))
    @given(case=cases(specs(dtypes=dtypes)), into=st.booleans())
    def body(case: Case, into: bool) -> None:
        judge(case, backend, namespace, into)

    body()
