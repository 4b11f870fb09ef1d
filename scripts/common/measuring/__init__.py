"""Run training scripts and judge what they compute: times in rounds, the same numbers, stray memory, peers, ceilings.

Imports common's loose modules and formulas. Begin with runs.py, which starts a script and reads its metrics.
"""
