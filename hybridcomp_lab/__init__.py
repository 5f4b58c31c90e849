"""Train GPTs with hybridcomp over PyTorch's parallel stack; plan such trainings, compare them in studies, show one.

The commands ``hybridcomp train``, ``generate``, ``plan``, ``study`` and ``demo`` are here. hybridcomp itself imports
nothing of it.
"""
