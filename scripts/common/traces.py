"""Names of profiles.py and roofline.py, until their callers have moved."""

from common.profiles import Kernel, Profile, read_profile, steps_needed  # noqa: F401
from common.roofline import ceilings_for, operator_table, read_ceilings, roofline_us, work  # noqa: F401
