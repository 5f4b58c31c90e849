"""Models and their expected results, for the cases."""
