"""Encode, send, receive and decode for generators; frame single messages."""
