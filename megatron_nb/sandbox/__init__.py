"""Runs untrusted programs: a judge of programs against tests, and the time complexity of a function.

Standard library only, plus the system's isolation tool (bubblewrap); service.py alone speaks HTTP.
"""
