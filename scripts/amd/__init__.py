"""Execute AMD's machine instructions without an AMD GPU: README.md says what is modelled and what is not.

Imports common's loose modules and formulas; no other room imports it, only commands. Begin with launch.py, which runs
a kernel, and machine.py, which holds its waves; own_kernels.py runs somebody's script.
"""
