"""Profile a step of versions 1 and 4, and keep when each of its kernels ran: what the picture "timeline" is drawn from.

    python scripts/maintain/timeline.py --preset small --use-amp --json timeline.json

All options but --json go to the training scripts. Exit status: 0; 1 if a run fails; 2 for a bad option.
"""

import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Parser, with_sizes
from common.profiles import read_profile, steps_needed
from common.runs import train
from common.tables import emit
from common.versions import SCRIPTS


def kernels_of_a_step(profile):
    """Return "start duration group" of each kernel of the last step, in us from the first one's start."""
    kernels = [call for call in profile.calls if call.kind != "copy"]
    step = kernels[-(len(kernels) // steps_needed(profile)) :]
    return [f"{(one.start_ns - step[0].start_ns) / 1e3:.1f} {one.total_ns / 1e3:.1f} {one.group}" for one in step]


def profiled(script, argv):
    with tempfile.TemporaryDirectory() as folder:
        train(script, [*argv, "--enable-pytorch-profiler", "--profile-dir", folder])
        return kernels_of_a_step(read_profile(folder))


def work(options, rest):
    argv = with_sizes(["--num-steps", "8", *rest])
    content = {"options": argv, "kernels": {f"v{version}": profiled(SCRIPTS[version], argv) for version in (1, 4)}}
    told = [f"version {name[1:]}: {len(found)} kernels" for name, found in content["kernels"].items()]
    emit(content, "\n".join(told), options.json)


def main(argv=None):
    return Parser("timeline.py", __doc__).run(work, argv, passes_on=True)


if __name__ == "__main__":
    sys.exit(main())
