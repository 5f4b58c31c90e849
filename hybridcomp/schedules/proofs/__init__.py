"""Run all ranks' schedules symbolically, without MPI and without data: what ``schedules/verify.py`` proves with."""
