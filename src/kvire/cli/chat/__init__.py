"""`kvire chat`: command.py is the loop, conversation.py what was said."""
