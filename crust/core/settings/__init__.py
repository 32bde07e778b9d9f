"""Settings: one frozen model per program; defaults < TOML file < CRUST_* environment < flags.

    program            what every daemon has, the kinds of values, and how a refusal words them
    proxy, shim,
    driver, kata       one program each; a model refuses what its program could not run with
    loading            merges the sources and checks the result

Unknown keys are refused. Only the module that composes a program sees its settings object: constructors get the two
or three values that they need.
"""

OWN_DRIVER = "block.csi.crust.dev"
"""The name of our driver, unless the settings give it another one. Here, because pydantic takes long to import."""
