"""Losses of jobs that change their execution plan, compared with those of jobs that do not."""
