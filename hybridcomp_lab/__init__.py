"""What is done with hybridcomp: a GPT trainer over PyTorch's parallel stack, its planner, studies and a demonstration.

The commands ``hybridcomp train``, ``generate``, ``plan``, ``study`` and ``demo`` are here. hybridcomp itself imports
nothing of it.
"""
