"""`crust doctor`: what a node needs, one small check per requirement.

A check only looks: it changes nothing, starts nothing, and needs no daemon. It looks below a root directory, so that
tests give it a directory of their own. What it finds is ok, a warning (crust works, with less) or an error, and says
what, why and what to do.
"""
