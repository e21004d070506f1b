"""Iteration time and memory of Cells: analytic cost model, profiling and calibration."""
