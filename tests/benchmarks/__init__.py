"""The benchmark programs, their arithmetic and their pages."""
