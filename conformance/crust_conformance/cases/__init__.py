"""The cases, one file per part of CSI. A number is never used twice, and never for another rule."""
