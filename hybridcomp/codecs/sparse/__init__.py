"""Codecs that send some elements and their places."""
