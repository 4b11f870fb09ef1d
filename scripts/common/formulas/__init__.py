"""Compute without running a step: FLOPs and bytes of every part, peaks of GPUs, occupancy, the rounding of TF32.

Imports nothing of ours, and no other room imports into it. Begin with counts.py.
"""
