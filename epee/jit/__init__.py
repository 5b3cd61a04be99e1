"""Run-time compilation of CUDA C++, a cache on disk, loading and launching. No installed compiler is needed.

`source.py` makes one text of a kernel and all that it includes, `compile.py` turns it into a cubin with NVRTC (through
`cuda.bindings`, which torch's own CUDA builds depend on), `cache.py` keeps cubins by content hash, `params.py` writes
the C++ side of an argument struct, `kernel.py` loads and launches. The package is independent of what kernels do.
"""
