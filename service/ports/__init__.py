"""The interfaces through which the service uses its stores, as protocols."""
