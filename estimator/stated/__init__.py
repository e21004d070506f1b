"""Execution plans as users state them: files of runtimes, options, and their completion."""
