"""Run ``hybridcomp train``: check the configuration, start the ranks, run the training."""

from __future__ import annotations

import contextlib
import io
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from hybridcomp import style
from hybridcomp.errors import ConfigError, HybridcompError, printable
from hybridcomp.launcher import LAST_WORDS_SECONDS, abort, check_launcher, inside_mpi
from hybridcomp_lab.train import launch, start
from hybridcomp_lab.train.interrupt import INTERRUPTED, StopRequest

if TYPE_CHECKING:
    from mpi4py import MPI

_WRONG_INPUT = 2
_READY = -1
_SECONDS_BETWEEN_RANKS = LAST_WORDS_SECONDS + 0.2
_PREFIX = "hybridcomp train: error: "


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0, 2 for wrong input, or 75 for a run that was asked to stop.

    Outside MPI, check everything that can be checked, then replace the process by ``mpiexec``; inside MPI
    the ranks check again, agree, and train.
    """
    job = None
    try:
        check_launcher()
        if not inside_mpi():
            job = start.prepare(arguments)
            if job.config.elastic:
                return _run_as_replica(job)
            if job.config.ranks > 1:
                launch.exec_under_mpiexec(job.config.ranks, job.config.threads, arguments)
    except HybridcompError as error:
        return _complain(str(error))
    return _run_as_rank(arguments, job)


def _complain(what: str) -> int:
    style.say(_PREFIX + printable(what), sys.stderr)
    return _WRONG_INPUT


def _run_as_replica(job: start.Job) -> int:
    """Train one replica of several that come and go, without MPI."""
    request = StopRequest()
    from hybridcomp_lab.train import elastic  # noqa: PLC0415  (loads torch)

    try:
        finished = elastic.run(job, request.stop_requested)
    except ConfigError as error:
        return _complain(str(error))
    except HybridcompError as error:
        style.say(f"{_PREFIX}{type(error).__name__}: {printable(str(error))}", sys.stderr)
        return 1
    return 0 if finished else INTERRUPTED


def _run_as_rank(arguments: Sequence[str], prepared: start.Job | None) -> int:
    request = StopRequest()
    from mpi4py import MPI  # noqa: PLC0415  (initialises MPI)

    comm = MPI.COMM_WORLD
    job = prepared
    status, printed = _READY, ""
    # A rank that ends alone would let the others wait, and one message is better than one per rank.
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            job = job or start.prepare(arguments)
            if comm.rank == 0:
                job = start.with_whole_checkpoint(job)
            launch.check_rank_count(job.config.ranks, comm)
        except HybridcompError as error:
            status, printed = _WRONG_INPUT, f"{_PREFIX}{printable(error)}\n"
        except SystemExit as stop:  # the command line's own parser, or --help
            status = stop.code if isinstance(stop.code, int) else _WRONG_INPUT
        except Exception:
            status, printed = 1, traceback.format_exc()
    replies = launch.gather_text(comm, str(status))
    bad = [rank for rank, reply in enumerate(replies) if int(reply) != _READY]
    if bad:
        if comm.rank == bad[0]:
            sys.stdout.write(out.getvalue())
            sys.stderr.write(err.getvalue() + printed)
        return int(replies[bad[0]])
    if job is None:
        raise RuntimeError("no job although nothing failed")
    found = "" if job.checkpoint is None else str(job.checkpoint.path)
    job = start.with_checkpoint(job, launch.gather_text(comm, found)[0])
    try:
        job = start.with_policy(job, launch.gather_text(comm, job.policy.name)[0])
        start.check_agreement(launch.gather_text(comm, start.agreed_text(job)))
    except HybridcompError as error:
        return _complain(str(error)) if comm.rank == 0 else _WRONG_INPUT
    job = start.with_run_directory(job, launch.gather_text(comm, job.config.out or "")[0])
    try:
        from hybridcomp_lab.train import trainer  # noqa: PLC0415  (loads torch)

        finished = trainer.run(job, request.stop_requested)
    except ConfigError as error:
        _abort(comm, f"{_PREFIX}rank {comm.rank}: {printable(error)}", _WRONG_INPUT)
    except HybridcompError as error:
        _abort(comm, f"{_PREFIX}rank {comm.rank}: {type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        _abort(comm, "", 130)
    except Exception:
        _abort(comm, f"{_PREFIX}rank {comm.rank} failed\n{traceback.format_exc()}", 1)
    return 0 if finished else request.exit_code(comm.rank)


def _abort(comm: MPI.Comm, what: str, code: int) -> NoReturn:
    """End all ranks: the others wait for this one, and would do so until the timeout."""
    # Where all fail alike, the first one ends the others before they speak: one message, not one a rank.
    time.sleep(min(comm.rank, 20) * _SECONDS_BETWEEN_RANKS)
    if what:
        style.say(what, sys.stderr)
    abort(comm, code)
    raise SystemExit(code)
