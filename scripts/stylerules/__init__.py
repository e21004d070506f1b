"""The rules of style that ``scripts/style.py`` counts."""
