"""Run a few instructions on one wave or one workgroup, and read registers back."""

import numpy as np

from amd.assembly import Kernel, parse_line
from amd.execute import Program
from amd.machine import LDS, Memory, Wave

WIDTH = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1201": 32}


def program_of(target, code, **given):
    """Return the Program of lines of assembly; a line that ends with a colon is a label."""
    labels, lines = {}, []
    for line in filter(None, map(str.strip, code.splitlines())):
        if line.endswith(":"):
            labels[line[:-1]] = len(lines)
        else:
            lines.append(parse_line(line))
    lines.append(parse_line("s_endpgm"))
    options = {
        "name": "test", "target": target, "width": WIDTH[target], "code": tuple(lines), "labels": labels, "vgprs": 256,
        "agprs": 256 if target.startswith("gfx9") else 0, "scratch": 0, "lds": 0, "scratch_buffer": False,
        "user_sgprs": 2, "kernarg_sgpr": 0,
        "workgroup_ids": (True, False, False), "kernarg_size": 0, "arguments": (),
    }  # fmt: skip
    return Program(Kernel(**options | given))


def bits(value):
    """Return 32-bit registers of a number or an array: float32 of floats, else integers."""
    value = np.asarray(value)
    if value.dtype.kind == "f":
        return value.astype(np.float32).view(np.uint32)
    return (value.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)


class Machine:
    """A workgroup of waves whose registers are noise but for those that are given."""

    def __init__(self, target, code, waves=1, lds=256, ranges=(), order=1, **given):
        self.program = program_of(target, code, **given)
        self.order = order
        self.lds = LDS(lds, waves, target)
        self.waves = [
            Wave(self.program.kernel, n, self.lds, Memory([(1 << 20, 1 << 20), *ranges], target)) for n in range(waves)
        ]
        noise = np.random.default_rng(0)
        self.lds.start(noise)
        for wave in self.waves:
            self.program.start(wave, (0, 0, 0), 0, noise)

    def run(self):
        with np.errstate(all="ignore"):
            self.program.run_workgroup(self.waves, self.lds, self.order, [0] * len(self.program.steps))
        return self


def run(target, code, v=None, s=None, mask=None, **options):
    """Return the wave after these instructions; v, s: {register: value}, mask: EXEC."""
    machine = Machine(target, code, **options)
    (wave,) = machine.waves
    for i, value in (v or {}).items():
        wave.v[i] = bits(value)
    for i, value in (s or {}).items():
        wave.set_scalar(i, int(bits(value)))
    if mask is not None:
        wave.set_exec(mask)
    machine.run()
    return wave


def floats(wave, register):
    return wave.v[register].view(np.float32)
