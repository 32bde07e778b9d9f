"""The `crust` command: composition and printing only. Every rule is in the packages below."""

import os

# At each start pydantic would search all installed packages for its plugins. Crust has none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
