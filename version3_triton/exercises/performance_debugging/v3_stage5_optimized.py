#!/usr/bin/env python3
"""Stage 5: version 3 as it is. Compare the other stages with it.

python v3_stage5_optimized.py                  # train; options of tiny_llama_v3.py are passed on
"""

import sys

from stage_tools import load_v3, main

v3 = load_v3()

if __name__ == "__main__":
    sys.exit(main(v3, 5))
