"""Commands that simulate and import traces."""
