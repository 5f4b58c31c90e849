"""Start MPI in ranks that another launcher than mpiexec started, torchrun, say; end it by a process's exit status.

MPICH and its kin meet by a small text protocol, PMI-1. :mod:`~hybridcomp.pmi.server` is the process that the ranks talk
to, :mod:`~hybridcomp.pmi.start` makes a rank one of them, :mod:`~hybridcomp.pmi.lifeline` learns from it who is gone.
:mod:`~hybridcomp.pmi.ending` is for all launchers.
"""
