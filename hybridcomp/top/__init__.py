"""Show what running jobs do: each rank keeps a small file, which ``hybridcomp top`` reads.

A rank writes its file when its first communicator is made, and then only while somebody watches: whoever reads touches
a file in the folder, at which ranks look once a second (:mod:`.publish`). Nothing a rank meets in that ends its job.
"""
