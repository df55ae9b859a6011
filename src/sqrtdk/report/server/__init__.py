"""Shows what a server's answers say of it: its laws, in the terminal and as JSON."""
