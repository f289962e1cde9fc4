"""`kvire replay`: options in command.py, output in show.py.

The replay itself is kvire.replay.
"""
