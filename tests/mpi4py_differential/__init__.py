"""The same call on plain mpi4py and on communicators of ours: same memory, or the same error.

``draws.py`` draws calls (hypothesis) as plain descriptions, and ``search.py`` shrinks those that differ. ``pool.py``
starts ranks and hands each draw to all of them. ``ranks.py`` is what a rank runs: it builds its buffers (``memory.py``,
``spelling.py``), makes the call (``calls.py``, ``messages.py``), and compares (``verdict.py``).
``python -m tests.mpi4py_differential`` runs for minutes, ``test_differential.py`` for seconds.
"""
