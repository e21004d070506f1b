"""The running system: the round, gRPC servers, the agent, the command line."""
