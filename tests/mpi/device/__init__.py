"""Arrays in the memory of a device, which the tests emulate on the CPU."""
