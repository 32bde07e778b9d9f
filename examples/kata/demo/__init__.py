"""The main job as one command: a volume's life, told step by step on this machine, with everything real.

The demo plays the kubelet. It starts driver, shim, proxy and the example runtime as processes of their own below one
temporary directory, and ends by proving that nothing of it is left. It exits non-zero if any step is not so.
"""
