"""The network: where traffic can go, who meets whom on which link, and what was decided about it (Crux).

``topology`` (vertices and links) -> ``routes`` (equal-cost paths) -> ``traffic`` and ``flows`` (what a job
sends between which GPUs) -> ``contention`` (all jobs, their choices of paths, links) -> ``plan`` (paths and
priorities) -> ``check``.
"""
