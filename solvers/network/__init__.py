"""Network plans: the paths of jobs, and which job is served first where they contend (Crux).

They are judged on a fluid model.
"""
