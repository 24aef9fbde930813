"""A real federation over Flower: the same rounds and the same client work, carried by Flower's messages.

Nothing here imports Flower until a module that needs it is imported: `client`, `server`, `grid`, `records`.
"""
