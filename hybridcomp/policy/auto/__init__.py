"""Decide for each message by the predictions of a profile and the measurements of this job: the policy ``auto``.

:mod:`.spec` says which fidelity an axis asks for, :mod:`.candidates` which codecs that allows, :mod:`.cost` how long
they take, :mod:`.decider` holds a communicator's decisions, :mod:`.reviews` measures and changes them at the same
operation on all ranks, and :mod:`.freeze` writes them as a policy.
"""
