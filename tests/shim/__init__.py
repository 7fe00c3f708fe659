"""CUDA C++ on the CPU: the same text that NVRTC gets, compiled by g++, every access checked.

    module = shim.RawModule(code=text, name_expressions=["scale<float>"])
    module.get_function("scale<float>")((blocks,), (threads,), (x, y, np.int64(n)), shared_mem=256)

The call is that of cupy.RawKernel, with NumPy arrays. Each CUDA thread is a fiber that runs until it waits
for others (barriers, shuffles, votes) or ends; `order=` chooses who goes first: 0 ascending, 1 descending,
else a seed, for threads and for blocks. Shared memory is filled with NaN before every block. `Fault` is
raised, naming the line, where a kernel

- touches memory that is neither an argument nor its own, or writes to a read-only array: an array is the
  bytes from its first to its last element; those behind pointers in structs are given as `arrays=`;
- reads or writes a misaligned address, indexes out of an array's declared bounds, overflows a signed integer;
- lets a thread touch shared memory where another has written, or write where another has read, with no
  barrier between;
- lets threads of a block wait at different barriers, or for lanes that never come;
- does not end;
- is given an argument of another size than its parameter's.

Inline PTX of the instructions in `ptx.MEANING` is understood. Other assembly is wrapped in small __device__
functions with another body under `#ifdef ROPEGRAD_ON_CPU`. Not here: blocks that wait for one another,
asynchronous copies, mbarrier, wgmma, arithmetic on half and bfloat16 (convert to float).
"""

from shim.arrays import apart, empty, reserve
from shim.build import why_not
from shim.module import Fault, Kernel, RawModule

__all__ = ["Fault", "Kernel", "RawModule", "apart", "empty", "reserve", "why_not"]
