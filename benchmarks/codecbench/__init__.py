"""Parts of ``benchmarks/codecs.py``: the list of codecs, the data, the peers, and how they are measured."""
