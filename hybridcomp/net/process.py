"""Start and talk to a lab's keeper, a process that answers on a pipe."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from hybridcomp.net import keeper
from hybridcomp.net.launch import LabError

DOWN_SECONDS = 30.0


class KeeperProcess:
    """Start the keeper of a lab (:mod:`hybridcomp.net.keeper`), and talk to it.

    Args:
        config: settings of the lab to make, in JSON's types.

    Attributes:
        pid: process id of the keeper.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def answer(self, seconds: float) -> Any:
        """Return the keeper's next answer.

        Raises:
            LabError: no answer came within ``seconds``, or the keeper has ended.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise LabError(f"the lab's keeper (process {self.pid}) did not answer within {seconds:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise LabError(f"the lab's keeper (process {self.pid}) has ended")
        return json.loads(line)

    def end_run(self, mark: str) -> None:
        """End every process of the run that carries ``mark``.

        Raises:
            LabError: the keeper does not answer.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"end {mark}\n")
        self._process.stdin.flush()
        self.answer(DOWN_SECONDS)

    def close(self) -> None:
        """Have the keeper end all processes of the lab and itself, and wait until it has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(DOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
