"""Run schedules step by step in Python: encode, send, receive, decode; frame single messages."""
