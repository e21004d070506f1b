"""The agent on a GPU node: holds a stream to any server and keeps gangs as they should be."""
