"""Fuzzing: hostile inputs on every wire and to every reader of files, as `scripts/fuzz.py` and the long tests run it.

A wire (`wires`) has a generator of inputs, a pure function of a seed, and a target that takes them: a real service in a
process of its own, or a process that reads files with the code of a service. `play` sends, watches and measures.
"""
