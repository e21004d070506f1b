"""The loops that run once a column, compiled. ``warm`` loads them before the first round needs them."""
