"""The compiled loops that run once for each column.

``warm`` loads them before the first round needs them.
"""
