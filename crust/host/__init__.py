"""The kernel and other programs: no other package calls them. One file per kernel interface or program.

Functions are plain and synchronous; an asynchronous caller makes one hop to a thread per operation, not one per
system call. One table in `syscalls` translates `OSError`, and no caller catches it.
"""
