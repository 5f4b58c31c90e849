"""Decide for each message by what a profile predicts and what this job has measured: the policy ``auto``.

:mod:`.spec` says which fidelity an axis asks for, :mod:`.candidates` which codecs that allows, :mod:`.cost` what they
take, :mod:`.decider` holds a communicator's decisions, :mod:`.reviews` measures and changes them at the same operation
on all ranks, and :mod:`.freeze` writes them as a policy.
"""
