"""The agent on a GPU node, which keeps a stream to any server and runs the desired gangs."""
