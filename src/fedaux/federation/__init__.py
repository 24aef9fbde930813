"""A real federation over Flower: the same rounds and the same client work, carried by Flower's messages.

With what people need to run one: the app's folder, keys, guarded Flower processes, and a view of the nodes. Nothing
here imports Flower until a module that needs it is imported: `client`, `server`, `grid`, `records`.
"""
