"""`python -m crust` is `crust`."""

from crust.cli.main import main

main()
