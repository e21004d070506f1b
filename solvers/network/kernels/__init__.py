"""The network's compiled loops, which run once for each event or order.

``solvers.warm`` loads them.
"""
