"""Split training steps into computing and exposed communication, from the traces of all ranks."""
