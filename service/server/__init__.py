"""The server: its gRPC calls, its rounds and its tasks."""
