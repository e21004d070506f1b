"""The gRPC server: its ports, its threads, its interceptors and its errors."""
