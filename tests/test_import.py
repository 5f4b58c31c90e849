from __future__ import annotations

import subprocess
import sys

CHECK = """
import sys
import hybridcomp
hybridcomp.get_codec("int8").encode(__import__("numpy").ones(9, "float32"))
hybridcomp.load_policy("hybrid")
loaded = [m for m in ("torch", "cupy", "mpi4py.MPI") if m in sys.modules]
assert not loaded, loaded
"""


def test_import_loads_neither_torch_nor_cupy_nor_mpi():
    subprocess.run([sys.executable, "-c", CHECK], check=True, timeout=60)


def test_unknown_attribute_is_an_attribute_error():
    code = 'import hybridcomp as h\ntry:\n    h.nothing\nexcept AttributeError as e:\n    assert "nothing" in str(e)'
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_hook_needs_no_mpi():
    """On gloo and NCCL nothing initialises MPI, which starts threads."""
    code = "import sys, hybridcomp.torch as hct\nhct.comm_hook\nassert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
