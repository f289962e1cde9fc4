"""`kvire chat`: command.py is the loop, conversation.py the messages."""
