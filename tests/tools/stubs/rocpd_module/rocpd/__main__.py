"""Run the stub of the command of ROCm 7.1."""

import pathlib
import runpy
import sys

profilers = pathlib.Path(__file__).resolve().parents[1] / "profilers.py"
sys.argv[0] = "rocpd"
runpy.run_path(str(profilers), run_name="__main__")
