"""Container images: built from the work tree, told apart by commit, pushed to every region's registry.

`source` has an image's origin and names, `tools` calls docker, podman or buildah, `registry` reads the contents of a
registry, `build` and `push` decide and then act.
"""
