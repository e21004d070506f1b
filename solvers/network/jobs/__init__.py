"""Job schedulers under which networks are compared: they place gangs and let jobs share GPUs.

``hived`` decides where a gang goes, and ``muri`` which jobs share their GPUs. Neither knows the load
of links.
"""
