"""The conversion of messages to domain values and back: a module for each .proto file."""

from tessera.service.server.convert.estimates import of_estimate as estimate_to_proto
from tessera.service.server.convert.jobs import of_spec as job_spec_to_proto

__all__ = ["estimate_to_proto", "job_spec_to_proto"]
