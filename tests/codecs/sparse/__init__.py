"""Codecs that send some elements."""
