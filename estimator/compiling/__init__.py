"""Compilation of sharded training steps for absent devices: collectives, FLOPs, bytes, memory."""
