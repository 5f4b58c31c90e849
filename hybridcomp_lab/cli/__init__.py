"""Commands of hybridcomp_lab, each in the module of its name: see :mod:`hybridcomp.cli.main`."""
