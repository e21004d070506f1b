"""The delivery of events of jobs to the URLs that tenants have registered."""
