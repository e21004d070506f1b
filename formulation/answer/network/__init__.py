"""Contention of jobs on the network, and the decisions about it (Crux).

The network itself is in ``topologies``. The steps are ``traffic`` (what a job sends, wherever it
is) -> ``flows`` (between which GPUs) -> ``contention`` (all jobs, their choices of paths, links) ->
``plan`` (paths and priority levels) -> ``check`` -> ``outcome`` (job by job).
"""
