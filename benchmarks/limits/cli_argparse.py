"""A command on argparse, with as many options as our worker has."""

import argparse

parser = argparse.ArgumentParser(prog="least", description="The least that a command on argparse costs.")
for name in "abcdefghijklmnopqrs":
    parser.add_argument(f"--option-{name}", metavar="X", help=f"what {name} means, in a line of help")
parser.add_argument("--level", type=int)
parser.parse_args()
