"""The command line: one file a command; a command imports what it needs when it runs."""
