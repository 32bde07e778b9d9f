"""Settings: one frozen model per program; defaults < TOML file < CRUST_* environment < flags.

    program            the common settings of the daemons, the kinds of values, and their words in refusals
    loading            merges the sources and checks the result

The model of a program is `settings.py` of its package, and refuses settings with which the program could not run.
Unknown keys are refused. Only the module that composes a program sees its settings object: constructors get the two
or three values that they need.
"""

OWN_DRIVER = "block.csi.crust.dev"
"""The name of our driver, unless the settings give it another one. Here, because pydantic takes long to import."""
