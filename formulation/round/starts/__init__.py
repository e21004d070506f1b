"""Planned starts: the reservations of waiting jobs, so that none of them starves.

``holds`` and ``shares`` say for how long jobs hold GPUs, and ``timeline`` when nodes become free.
``ways`` has the Cells and nodes on which jobs may start, and ``planner`` decides when each waiting job
starts at the latest (docs/mathematics/promises.md).
"""
