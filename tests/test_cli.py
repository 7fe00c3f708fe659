"""The command line: what it prints, what it writes, and its exit status."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ropegrad import cli, info
from ropegrad.backends.portable import Portable
from ropegrad.spec import QkvSpec
from ropegrad.suites import SUITES
from ropegrad.verify import conformance
from ropegrad.verify.cases import qkv_edge_cases


def run(*arguments, monkeypatch):
    """Exit status of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["ropegrad", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def test_verify_quick_is_right_and_says_so(monkeypatch, capsys, tmp_path):
    report = tmp_path / "report.json"
    assert run("verify", "--quick", "--json", str(report), monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "numpy_tiled" in printed
    assert "portable" in printed
    assert "all right" in printed
    written = json.loads(report.read_text())
    assert {case["op"] for case in written["cases"]} == {"rope", "qkv"}
    assert all(case["passed"] for case in written["cases"])
    assert written["info"]["packages"]["numpy"] == np.__version__


def test_a_suite_row_is_shown_with_figures(monkeypatch, capsys):
    name, spec = next(iter(SUITES["rope"]().items()))
    monkeypatch.setitem(SUITES, "rope", lambda: {name: spec})
    assert run("verify", "--suite", "rope", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "ok B2 S128 H32/8" in printed
    assert "GB/s" in printed


def test_a_wrong_backend_is_named_and_fails(monkeypatch, capsys):
    kept = Portable.rope_backward

    def wrong(self, spec, inputs, out):
        return {name: -x for name, x in kept(self, spec, inputs, None).items()}

    monkeypatch.setattr(Portable, "rope_backward", wrong)
    assert run("verify", "--quick", "--suite", "rope", monkeypatch=monkeypatch) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert "portable: wrong value: grad_q" in printed


def test_what_cannot_be_judged_has_status_2(monkeypatch, capsys, tmp_path):
    assert run("verify", "--backend", "cuda", monkeypatch=monkeypatch) == 2
    assert "'numpy_tiled'" in capsys.readouterr().out
    assert run("verify", "--suite", "attention", monkeypatch=monkeypatch) == 2
    assert run("verify", "--qick", monkeypatch=monkeypatch) == 2
    assert run("verify", "--quick", "--json", str(tmp_path), monkeypatch=monkeypatch) == 2


def test_interrupted(monkeypatch):
    def stop(*arguments, **words):
        raise KeyboardInterrupt

    monkeypatch.setattr(conformance, "check_all", stop)
    assert run("verify", "--quick", monkeypatch=monkeypatch) == 130


def test_info_names_versions_and_backends(monkeypatch, capsys):
    assert run("info", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    for word in ("numpy", np.__version__, "blas", "cores", "numpy_tiled", "portable", "cupy"):
        assert word in printed


def fake_cupy(nvrtc):
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(driverGetVersion=lambda: 0, runtimeGetVersion=lambda: 12090),
        nvrtc=SimpleNamespace(getVersion=nvrtc),
    )
    return SimpleNamespace(cuda=cuda, __spec__=object())


def test_info_names_the_versions_of_cuda_that_must_fit(monkeypatch):
    def no_library():
        raise ImportError("libnvrtc.so.13")

    monkeypatch.setattr(info, "_version", lambda package: None if package.startswith("cupy-cuda13") else "1")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(lambda: (13, 5)))
    assert info.info()["cuda"] == "driver missing, runtime 12.9, NVRTC 13.5"
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(no_library))
    assert info.info()["cuda"].endswith("NVRTC missing (ImportError: libnvrtc.so.13)")
    monkeypatch.setattr(info, "_version", lambda package: "1")
    assert info.info()["cuda"].endswith("; two CuPys share one folder: uninstall both, then install one")


def test_info_says_where_compiled_kernels_cannot_be_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    assert info.info()["kernel cache"] == str(tmp_path / "deep" / "cache")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert info.info()["kernel cache"].endswith("cache cannot be written: set CUPY_CACHE_DIR")


def test_info_survives_a_cupy_that_cannot_be_imported(monkeypatch, tmp_path):
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise ImportError('libnvrtc.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    found = info.info()
    assert found["cuda"].startswith("CuPy cannot be imported: ImportError: libnvrtc.so.13: no such file")
    assert found["devices"] == ["no GPU: ImportError: libnvrtc.so.13: no such file"]


def test_the_module_runs_like_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "ropegrad", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0.1.0"


@pytest.mark.parametrize("command", ["--json /dev/full", "> /dev/full", "| true"])
def test_what_cannot_be_told_is_no_verdict(command):
    """Status 1 says wrong, so a full disk or a reader that goes must not give it."""
    line = f"set -o pipefail; {sys.executable} -m ropegrad verify --quick --suite qkv {command}"
    assert subprocess.run(["bash", "-c", line], capture_output=True, check=False).returncode == 2


def test_a_case_that_a_backend_cannot_run_is_not_its_fault(monkeypatch, capsys):
    def why_not(self, spec):
        geometry = spec.rope if isinstance(spec, QkvSpec) else spec
        return "it sums in float32, this is float64" if geometry.compute == "float64" else None

    monkeypatch.setattr(Portable, "why_not", why_not)
    assert run("verify", "--quick", "--suite", "qkv", "--backend", "portable", monkeypatch=monkeypatch) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("qkv  portable"))
    cases, right = map(int, row.split()[2:4])
    assert right == cases == len(qkv_edge_cases()) - 1


def test_a_backend_that_raises_is_a_finding(monkeypatch, capsys):
    def broken(self, spec, inputs, out):
        raise MemoryError("planted")

    monkeypatch.setattr(Portable, "qkv_rope_backward", broken)
    assert run("verify", "--quick", "--suite", "qkv", monkeypatch=monkeypatch) == 1
    assert "portable: raised: MemoryError: planted" in capsys.readouterr().out
