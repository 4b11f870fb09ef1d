"""Run the stub of the command of ROCm 7.1, which lies beside this package."""

import sys

import profilers

profilers.PROGRAM = "rocpd"
sys.exit(profilers.main())
