"""Links that are cut, slow or lose packets, in the lab."""
