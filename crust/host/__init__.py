"""The kernel and other programs: the only room that touches them, one outside thing per file.

Functions are plain and synchronous; an asynchronous caller makes one hop to a thread per operation, not one per
syscall. `OSError` ends here: it is translated by one table (`oserrors`), and nobody above catches it.
"""
