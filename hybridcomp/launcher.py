"""Where this environment's ``mpiexec`` is."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from hybridcomp.errors import ConfigError


def find_mpiexec() -> str:
    """The mpiexec beside this Python, else the first on PATH.

    Raises:
        ConfigError: there is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "mpiexec"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise ConfigError(
            f"no mpiexec beside {sys.executable} and none on PATH: "
            "`pip install 'hybridcomp[mpich]'` brings MPICH's, or load the site's MPI"
        )
    return found
