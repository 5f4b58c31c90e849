"""Compare a training program as it is with the same under several candidates: speed, bytes, loss, and what to take."""
