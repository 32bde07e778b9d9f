"""The node daemon where the CO's CSI socket is.

It decides per publish whether mounting is deferred, takes the metadata out of the shim's answer and hands it to a
runtime handler through the handoff directory; statistics and expansion travel back through it. Whatever is not
about deferral passes as bytes. It keeps nothing that it cannot see again after a kill -9: the handoff directory
says what is deferred, mountinfo what is sealed, open streams which handlers live.
"""
