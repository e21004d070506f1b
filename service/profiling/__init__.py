"""The process that measures layers on a GPU, which an agent starts."""
