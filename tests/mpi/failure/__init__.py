"""What goes wrong, and what all ranks are told of it."""
