"""The calls of the CSI socket: which are about a deferred volume, and what is done for each that is.

All other calls pass to the driver as bytes. What is remembered lies in `crust.proxy.deferrals`; the handlers are
asked through `crust.proxy.runtimes`.
"""
