"""Fuzzing of the decoders: :mod:`.target` is the target, :mod:`.guided` and :mod:`.smoke` run it."""
