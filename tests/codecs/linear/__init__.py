"""Codecs whose messages are summed as they are."""
