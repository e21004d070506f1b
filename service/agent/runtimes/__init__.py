"""The runtimes: they start a gang's processes on a node, and know how to stop and observe them."""
