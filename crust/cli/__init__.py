"""The `crust` command: composition and printing only. Every rule is in the packages below."""
