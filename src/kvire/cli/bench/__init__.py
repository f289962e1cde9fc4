"""`kvire bench`: the options are in command.py and options.py, the servers in arms.py.

The rest is kvire.bench.
"""
