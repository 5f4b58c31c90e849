"""Ranks short of threads, memory, files and shared memory."""
