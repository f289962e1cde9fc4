"""`kvire plan`: command.py and options.py ask, show.py and picture.py show; the plan itself is
kvire.plan.
"""
