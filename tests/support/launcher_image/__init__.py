"""Stand-ins for an image with PyTorch and DeepSpeed: only their launchers, which start the ranks of a node.

A launcher takes exactly the arguments that agents give, and others are an error.
"""
