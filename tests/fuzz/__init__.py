"""Fuzzing of the decoders: :mod:`.target` is what is run, :mod:`.guided` and :mod:`.smoke` run it."""
