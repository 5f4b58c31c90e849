"""Measure a profile on all ranks: what ``hybridcomp doctor --calibrate`` does."""
