"""A codec and an algorithm for hybridcomp, from a package of its own."""
