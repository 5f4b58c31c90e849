"""Decide anew, as a job goes on, what a rule's codec keeps: by figures of the data on which all ranks agree."""
