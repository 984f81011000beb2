"""Container images: built from the work tree, told apart by commit, pushed to every region's registry.

`source` says what is built and what it is called, `tools` speaks to docker, podman or buildah, `registry` reads what a
registry holds, `build` and `push` decide and then do.
"""
