"""Raw traces of clusters: Philly, Helios, PAI 2020, Acme and Slurm's accounting, as jobs with durations.

They say when a job arrived and how many GPUs it held for how long, but nothing of its model.
``tessera.simulator.traces.redraw`` draws that. Files are read row by row and never held as a whole.
"""
