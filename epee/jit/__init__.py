"""Compile CUDA C++ at run time, keep the result on disk, load and launch it. No compiler is installed for this.

`source.py` makes one text of a kernel and all that it includes, `compile.py` turns it into a cubin with NVRTC (through
`cuda.bindings`, which torch's own CUDA builds depend on), `cache.py` keeps cubins by content hash, `params.py` writes
the C++ side of an argument struct, `kernel.py` loads and launches. Nothing here knows what a kernel does.
"""
