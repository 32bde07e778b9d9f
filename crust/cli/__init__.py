"""The `crust` command: composition and printing only. Every rule lives in the rooms below."""
