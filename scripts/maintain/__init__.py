"""Keep this repository true: the one harness, recording, generated tables and pictures, checks of pages and wrappers.

May import every room and command; nothing that a participant runs imports it. Begin with record.sh and ladder.py.
"""
