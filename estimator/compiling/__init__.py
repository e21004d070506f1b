"""Sharded training steps compiled by XLA for devices that do not exist: collectives, FLOPs, bytes, memory."""
