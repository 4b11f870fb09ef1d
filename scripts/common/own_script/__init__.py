"""Compare two training scripts of anybody's, before and after a change: the parts of compare_training.py.

Imports common's loose modules, measuring, and from check_training.py the watcher. Begin with session.py; child.py is
the half that runs in the user's process.
"""
