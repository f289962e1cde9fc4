"""`kvire plan`: options in command.py and options.py, output in show.py and picture.py.

The plan itself is kvire.plan.
"""
