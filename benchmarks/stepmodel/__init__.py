"""Compare predicted training steps with measured ones in the lab."""
