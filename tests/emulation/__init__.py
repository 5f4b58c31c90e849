"""CUDA kernels run on the CPU: :class:`.emulator.Emulator` builds and launches them, and catches their faults.

Each thread of a block is a fiber, which runs until it waits; blocks run in turn. Faults that are found, and where:

* divergent barriers, warp collectives whose lanes are elsewhere or gone, kernels that wait for ever, launches of
  more threads than a kernel's bound: in both flavours;
* data races and missing fences between threads and blocks, whatever order they ran in; accesses outside global
  buffers and shared arrays; misaligned accesses; reads of shared memory that nobody wrote: in ``race``;
* what AddressSanitizer and UndefinedBehaviorSanitizer find: in ``checked``.

Not found: reads of global memory that nobody wrote; endless loops without waits, atomics or accesses to memory. Two
of many concurrent readers of a word are remembered, so a race with a third can escape if both of those are ordered
by __syncwarp. Two threads of a block that order their accesses by __threadfence_block and a flag are reported though
CUDA allows it; by __threadfence and an atomic counter in global memory they are not.
"""
