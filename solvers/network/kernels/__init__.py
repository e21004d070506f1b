"""The network's loops that run once an event or an order, compiled; ``solvers.kernels.warm`` loads them."""
