"""Who meets whom on the network, and what was decided about it (Crux); the network is in ``topologies``.

``traffic`` (what a job sends, wherever it is) -> ``flows`` (between which GPUs) -> ``contention`` (all jobs,
their choices of paths, links) -> ``plan`` (paths and priorities) -> ``check`` -> ``outcome`` (job by job).
"""
