"""Stub of ROCm 7.0's module rocpd, which has no command: python3 -m rocpd convert. It refuses other interpreters."""

import pathlib
import sys

BUILT_FOR = pathlib.Path(__file__).parents[1].parent.name  # .../lib/python3.12/site-packages/rocpd

if f"python{sys.version_info[0]}.{sys.version_info[1]}" != BUILT_FOR:
    raise ImportError(f"rocpd was built for {BUILT_FOR}, this is Python {sys.version.split()[0]}")
