"""The `crust` command: composition and printing only. Every rule is in the packages below."""

import os

# At each start pydantic would look through all installed packages for plugins of its own. There are none for crust.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
