"""Set up and describe the machine: Python environment and pinned versions, profilers' wrappers, a room's checks.

Imports common's loose modules, formulas and measuring. Begin with environment.sh, and wrappers/setup.sh.
"""
