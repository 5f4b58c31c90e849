"""Run a rank's command, and end all ranks when it fails.

MPICH's mpiexec ends the other ranks when one fails that has started MPI. One that has not, as in a program that uses
gloo, may leave the others waiting for it for as long as their own timeouts last: half an hour, in PyTorch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from hybridcomp import style
from hybridcomp.launcher import LAST_WORDS_SECONDS, hydra_socket, torchrun_variables

# mpiexec sends a rank's signals to all processes of its group, so the command gets these by itself.
_COMMANDS_OWN = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def run_and_watch(command: list[str]) -> NoReturn:
    """Run this rank's command and exit with its status, 128 + number after a signal; end all ranks where it fails."""
    sys.stdout.flush()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _COMMANDS_OWN}
    heeded = [number for number, action in before.items() if action is not signal.SIG_IGN]
    pid = os.posix_spawnp(
        command[0], command, os.environ, setsigdef=[*heeded, signal.SIGPIPE, signal.SIGXFSZ]
    )  # the last two are ignored by Python
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        if -status not in _COMMANDS_OWN:  # one that was asked to end needs no explanation
            how = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
            style.say(
                f"hybridcomp run: rank {torchrun_variables()['RANK']} {how}; ending all ranks",
                sys.stderr,
            )
        status = 128 - status if status < 0 else status
        time.sleep(LAST_WORDS_SECONDS)
        with suppress(OSError):  # a rank that has left MPI in order has no connection any more
            os.write(hydra_socket(), f"cmd=abort exitcode={status}\n".encode())
    sys.exit(status)
