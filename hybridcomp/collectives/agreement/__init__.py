"""Check what all ranks must have alike: when a communicator is made, and at each operation if asked."""
