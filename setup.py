"""The native kernels, which are compiled when the package is installed; all else is in pyproject.toml.

They are plain C without Python's headers or torch's, loaded with ctypes, so that one file is good for all Pythons.
Where they cannot be compiled the package is installed without them, and torch's updates are used. ``ZEROMESH_PURE=1``
leaves them out, for a wheel that any machine takes.
"""

import os
import sysconfig

from setuptools import Extension, setup

# Vectors are written out in the source. A compiler that makes more of them spoils the 64-bit products of checksums.
PLAIN = ["-fno-tree-vectorize", "-fno-tree-slp-vectorize"]

# Python without a global lock has no stable ABI to name; the library is the same.
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")
native = Extension(
    "zeromesh.base.kernels._native",
    ["zeromesh/base/kernels/native.c", "zeromesh/base/kernels/messages.c"],
    depends=["zeromesh/base/kernels/native.h", "zeromesh/base/kernels/lanes.h"],
    # Products and sums are joined where the source says so only: each instruction set gives the same bits.
    extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", *PLAIN, "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
    py_limited_api=stable,
)
pure = os.environ.get("ZEROMESH_PURE", "0") != "0"
setup(
    ext_modules=[] if pure else [native],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable and not pure else {},
)
