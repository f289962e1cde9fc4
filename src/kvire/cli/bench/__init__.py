"""`kvire bench`: command.py and options.py have the options, arms.py what is measured; the rest is
kvire.bench.
"""
