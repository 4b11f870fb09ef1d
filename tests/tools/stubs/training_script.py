"""In place of a training script: its file name says how it behaves, and a log beside it that it ran."""

import pathlib
import shutil
import sys
import time

arguments = sys.argv[1:]
name = pathlib.Path(__file__).stem
with open(pathlib.Path(__file__).with_name("log"), "a") as log:
    print(name, *arguments, file=log)
if name == "v2":
    print("step 1\nTraceback:\nRuntimeError: no such kernel", file=sys.stderr)
    sys.exit(1)
if name == "v3" and "--use-amp" in arguments:
    print("v3.py: error: no bfloat16 here", file=sys.stderr)
    sys.exit(2)
if name == "v4":
    time.sleep(60)
shutil.copy(pathlib.Path(__file__).with_name("metrics.json"), arguments[arguments.index("--metrics-file") + 1])
