"""A stand-in for an image with Alpa: its folder on PYTHONPATH has packages ``alpa`` and ``ray``.

They take exactly the arguments that ``alpa_signatures.json`` records, and train nothing but numbers.
"""
