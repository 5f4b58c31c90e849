"""Choose algorithms, and build the schedules of operations."""
