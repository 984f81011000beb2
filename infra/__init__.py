"""The Pulumi program that makes what a lab shares."""
