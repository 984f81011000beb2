"""The command line. `main` dispatches and prints errors, `commands` is the tree, every other file is one verb."""
