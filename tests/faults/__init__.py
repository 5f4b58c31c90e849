"""Scenarios of planted faults: each a module with ``scenario(seed)``, run by its test and by :mod:`.chaos`."""
