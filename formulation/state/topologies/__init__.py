"""The network: vertices and links, the files that describe them, and the routes through it.

``described`` (texts, cached) -> ``document`` (files) -> ``builders`` (fabrics by a few numbers) ->
``topology`` (vertices and links) -> ``routes`` (equal-cost paths, by ``insides`` of hosts and
``fabric``).
"""
