"""Command line: arguments in, calls down, text out. One file for each sub-command."""
