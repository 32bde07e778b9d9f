"""This process and others: commands, deadlines, capabilities, errno, and bare system calls."""
