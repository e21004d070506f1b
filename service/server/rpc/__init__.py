"""The gRPC side of the service: names, errors, paging, conversion and the servicers."""
