"""The papers' models as Equinox modules at any size, and steps of them at the papers' sizes."""
