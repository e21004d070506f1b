"""The price of a given execution plan: iteration time and memory on the model's own layers."""
