"""Run a rank as a child, so that the launcher does not see it die: hydra kills the others then, now and then, whatever
it was told. ``python -m tests.net.kept FOLDER FILES COMMAND ...`` ends once so many files are in the folder."""

import os
import subprocess
import sys
import time

_SECONDS = 20.0


def main(folder: str, files: str, *command: str) -> None:
    """End well, however the command does."""
    subprocess.run(command, close_fds=False, check=False)  # it speaks to hydra over an open file
    deadline = time.monotonic() + _SECONDS
    while len(os.listdir(folder)) < int(files) and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
