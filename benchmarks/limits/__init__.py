"""The limits of the machine without any framework; goals are fractions of them."""
