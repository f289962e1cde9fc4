"""`kvire replay`: command.py has the options, show.py what is shown; the replay itself is
kvire.replay.
"""
