"""Codecs whose messages are summed as they are, in rounds."""
