"""Network plans: the paths of jobs, and which job is served first where they contend (Crux).

They are compared on a fluid model.
"""
