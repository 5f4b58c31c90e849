"""Show the activity of running jobs: each rank keeps a small file, which ``hybridcomp top`` reads.

A rank writes its file when its first communicator is made, and then only while somebody watches: each reader touches
a file in the folder, at which ranks look once a second (:mod:`.publish`). No error in that ends a rank's job.
"""
