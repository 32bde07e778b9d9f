"""The commands of `crust`, a file for each, under its name: what it is called with. What it runs is imported then."""
