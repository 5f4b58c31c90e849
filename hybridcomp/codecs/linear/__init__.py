"""Linear codecs, whose messages are summed without being decoded, in rounds."""
