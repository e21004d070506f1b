"""The interfaces of the service that have several implementations, as protocols."""
