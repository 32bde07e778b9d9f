"""`crust doctor`: the requirements of a node, one small check for each.

A check changes nothing, starts nothing, and needs no daemon. It looks below a root directory, so that tests give it
their own. A finding is ok, a warning (crust works with fewer features) or an error, with its reason and remedy.
"""
