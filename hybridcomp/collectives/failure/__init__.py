"""What keeps an operation's failure on one rank, or in one thread, from becoming everybody's silence."""
