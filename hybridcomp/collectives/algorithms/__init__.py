"""The algorithms as generators, for arrays in a device's memory, and the choice between algorithms."""
