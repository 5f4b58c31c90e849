"""Models and what they should come to, for the cases."""
