"""The rules that every stack obeys: plain functions, and the pack that lets the engine apply them."""
