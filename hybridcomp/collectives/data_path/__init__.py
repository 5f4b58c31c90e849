"""What generators encode, send, receive and decode with; framing of single messages."""
