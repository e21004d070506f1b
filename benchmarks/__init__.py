"""Clusters, workloads and measurements that Tessera is run on outside of tests."""
