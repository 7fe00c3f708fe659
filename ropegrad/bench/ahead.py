"""torch.compile's work for all cases at once: processes side by side, whose results Inductor keeps on disk.

The run that follows compiles everything again in one process, and finds what takes the time done. Autotuning
stays with that run: it measures, and wants the GPU for itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
from collections.abc import Sequence

from ropegrad.bench.contender import Spec, is_textbook
from ropegrad.bench.place import Choice
from ropegrad.spec import RopeSpec
from ropegrad.tiles import cores
from ropegrad.verify.case import QKV_INPUTS, ROPE_INPUTS
from ropegrad.verify.draws import input_shapes

LIMIT = 150  # seconds; the run compiles what is not done by then


def compile_ahead(specs: Sequence[Spec]) -> None:
    """Of these problems, all that PyTorch compiles; whatever fails, fails again where it is recorded."""
    wanted = [spec for spec in specs if is_textbook(spec)]
    if not wanted or importlib.util.find_spec("torch") is None:
        return
    workers = min(len(wanted), max(cores() // 2, 1))
    with multiprocessing.get_context("spawn").Pool(workers) as pool, contextlib.suppress(Exception):
        pool.map_async(compile_all, wanted, chunksize=1).get(LIMIT)


def compile_all(spec: Spec) -> int:
    """One call of each; how many were compiled."""
    import cupy
    import torch._inductor.config

    from ropegrad.bench.rivals import contenders

    torch._inductor.config.compile_threads = 1  # the processes are the threads
    torch._inductor.config.autotune_local_cache = False  # which kernel is faster shows on an idle GPU
    shapes = input_shapes(spec)
    names = ROPE_INPUTS if isinstance(spec, RopeSpec) else QKV_INPUTS
    inputs = {name: cupy.ones(*shapes[name]) for name in names}
    done = 0
    for one in contenders(spec, Choice()):
        if one.options.get("compiled") and "mode" not in one.options:
            with contextlib.suppress(Exception):
                one.bind(inputs)()
                done += 1
    return done
