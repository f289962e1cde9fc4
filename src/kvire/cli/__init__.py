"""The `kvire` command: composes the other folders, and nothing imports it.

Read first: main.py. Results go to standard output, everything else to standard error, so that
output can be piped; `--json` prints what programs need.
"""
