"""The algorithms as generators, which arrays in a device's memory take; and which one an operation uses."""
