"""What ``benchmarks/codecs.py`` is made of: the list of codecs, the data, the peers, and how they are measured."""
