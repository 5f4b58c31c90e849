"""CUDA kernels run on the CPU: :class:`.emulator.Emulator` builds and launches them, and catches their faults."""
