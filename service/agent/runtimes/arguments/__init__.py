"""Arguments of the launchers that users have, made from a gang and its execution plan.

These modules are pure. They start nothing and read no file.
"""
