"""The servers that are measured: one of another operator by its URL (url.py), or `kvire serve` in
processes of our own (kvire_repeat.py, set up by kvire_setup.py, run by server.py).

The protocol of an arm and its passes are in ../arm.py. Imported by the command line alone.
"""
