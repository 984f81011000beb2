"""The Pulumi program that makes a lab's shared infrastructure."""
