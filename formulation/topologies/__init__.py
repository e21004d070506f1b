"""What a network looks like: vertices and links, files that describe them, and the ways that there are.

``described`` (texts, remembered) -> ``document`` (files) -> ``builders`` (fabrics by a few numbers) ->
``topology`` (vertices and links) -> ``routes`` (equal-cost paths, by ``insides`` of hosts and ``fabric``).
"""
