"""The running system: rounds, gRPC servers, the agent and the command line."""
