"""Slow and simple second implementations with which tests compare the product."""
