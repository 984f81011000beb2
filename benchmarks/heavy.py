"""A module of 300 MB: every page of it is touched when it is imported."""

CONTENTS = bytearray(300 * 1024 * 1024)
CONTENTS[::4096] = b"x" * len(CONTENTS[::4096])
