"""Hold what every command uses: command line, files, tables, report, ratios, the four versions and a step's parts.

The rooms: formulas, measuring, profiles, own_script, machine. A loose module here imports none of them.
Begin with command_line.py. A regular package, so that no installed one of the same name comes first.
"""
