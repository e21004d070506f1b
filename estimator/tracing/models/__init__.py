"""The papers' models as Equinox modules of any size, and steps of them at the papers' sizes."""
